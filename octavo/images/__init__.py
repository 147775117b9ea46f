"""Images: files read within limits, and the image processor of each model family. Read ``processors.py`` first."""
