"""The program ``octavo``: one module a command, imported when the command runs. Read ``main.py`` first."""
