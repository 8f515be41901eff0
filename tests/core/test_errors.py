"""Errors are found by their names, and each has a status."""

from overwinter.core import errors


def test_every_error_is_found_by_its_name():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    tree = [kind for kind in kinds if issubclass(kind, errors.OverwinterError)]
    assert len(tree) > 12
    for kind in tree:
        assert errors.error_named(kind.__name__) is kind
        assert 400 <= kind.status < 600
        assert kind.__name__ in errors.__doc__


def test_an_unknown_name_is_a_workers_error():
    assert errors.error_named("KeyboardInterrupt") is errors.WorkerError
