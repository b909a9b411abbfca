"""Random schedules of the streaming loop in virtual time: what they do to samples."""
