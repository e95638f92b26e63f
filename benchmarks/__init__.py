"""What measures speed, side by side with what a user would pick instead. Run by ``python -m``."""
