"""Every public name of Keras has a recipe, so that a new version brings its own list to do."""

import pytest

from tests.matrix import names, recipes, training

recipes.import_all()


@pytest.mark.parametrize("family", names.of_keras())
def test_every_name_has_a_recipe(family):
    found = {
        name for one in training.bundles().values() if one.family == family for name in one.names
    }
    exempt = names.EXEMPT.get(family, {})
    missing = set(names.of_keras()[family]) - found - set(exempt)
    assert not missing, f"Give these names of Keras recipes in tests/matrix: {sorted(missing)}"


def test_a_name_without_a_recipe_is_found(monkeypatch):
    monkeypatch.setattr("keras.layers.New", type("New", (), {}), raising=False)
    with pytest.raises(AssertionError, match="New"):
        test_every_name_has_a_recipe("layers")
