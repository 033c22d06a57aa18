"""A batch's folder on disk: private files, the journal, and checks of what is read back."""
