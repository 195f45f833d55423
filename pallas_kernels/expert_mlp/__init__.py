"""The routed experts of a mixture of experts, without dropping."""
