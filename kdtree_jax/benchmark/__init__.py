"""What a step costs, what it must cost, and what that is worth."""
