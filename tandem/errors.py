"""The two ways in which a command ends badly. A ValueError from anywhere counts as Usage."""


class Usage(ValueError):
    """The command or its settings are wrong; the message is one line for the user."""


class RunFailed(RuntimeError):
    """A run failed, and its folder has the traceback; or it served nobody, or a server lost
    requests: the line says why."""
