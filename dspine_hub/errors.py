"""The one exception whose message is meant for users; the command line prints it without a traceback."""


class DSpineHubError(Exception):
    """A problem the user can fix: the message names the thing, the rule, the value received and the remedy."""


def describe_problems(error) -> str:
    """Render what pydantic's `ValidationError` found as one line: key in backticks, rule, value."""
    parts = []
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        value = problem["input"]
        shown = f", got {value!r}" if isinstance(value, str | int | float | bool | None) else ""
        parts.append(f"`{key}`: {message}{shown}." if key else f"{message}.")
    return " ".join(parts)
