"""The one exception whose message is meant for users; the command line prints it without a traceback."""


class DSpineHubError(Exception):
    """A problem the user can fix: the message names the thing, the rule, the value received and the remedy."""
