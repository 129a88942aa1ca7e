"""Messages, prompts, the trajectory record and token bookkeeping."""
