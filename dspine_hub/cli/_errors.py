"""Turn the errors meant for users into one readable message and exit code 1; bugs keep their traceback."""

import functools

import click

from dspine_hub.errors import DSpineHubError


def readable_errors(function):
    """Decorate a command so that `DSpineHubError` ends it without a traceback."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except DSpineHubError as error:
            raise click.ClickException(str(error)) from error

    return wrapped
