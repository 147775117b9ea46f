"""Speech: audio, features, and the loop of a transcription, without a model. Read ``transcription.py`` first."""
