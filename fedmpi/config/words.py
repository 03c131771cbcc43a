"""The one grammar of settings: words of a command line, of files and of sweep plans."""


def flatten(settings):
    """A nested settings dict as key -> value: {"algorithm": {"name": "fafed"}} is {"algorithm": "fafed"}."""
    flat = {}
    for key, value in settings.items():
        if not isinstance(value, dict):
            flat[key] = value
            continue
        for inner, inner_value in value.items():
            flat[key if inner == "name" else f"{key}.{inner}"] = inner_value
    return flat
