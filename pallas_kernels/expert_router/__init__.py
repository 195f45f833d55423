"""The router of a mixture of experts: which experts a row goes to."""
