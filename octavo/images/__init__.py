"""Images: files read within bounds, and what each family of models makes of an image before its network sees it."""
