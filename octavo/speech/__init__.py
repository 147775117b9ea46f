"""Speech: audio in, features, the loop of a transcription and its formats; plain data, no model."""
