"""What is written for good: private files, journals, and checks of what is read back."""
