"""The program ``octavo``: one module a command, imported when the command is run."""
