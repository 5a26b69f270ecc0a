"""What to do about what was seen: pure functions, total, with every reason in words."""
