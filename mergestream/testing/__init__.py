"""Contract checks for methods and readouts, and small models to test them on.

    @pytest.mark.parametrize("check", method_checks(MyMethod(), MyMethod(strength=2)), ids=str)
    def test_the_contract(check):
        check()

`readout_checks` takes the names of readouts. A check has no arguments and raises an AssertionError that says what is
wrong. Nothing here needs pytest. No check knows a method's formula: test the formula separately.
"""

from mergestream.testing.contract import Check as Check
from mergestream.testing.contract import method_checks as method_checks
from mergestream.testing.contract import readout_checks as readout_checks
from mergestream.testing.models import LINEAR as LINEAR
from mergestream.testing.models import SHAPES as SHAPES
from mergestream.testing.models import StateDict as StateDict
from mergestream.testing.models import assert_close as assert_close
from mergestream.testing.models import assert_same as assert_same
from mergestream.testing.models import exported as exported
from mergestream.testing.models import files as files
from mergestream.testing.models import load_model as load_model
from mergestream.testing.models import make_models as make_models
from mergestream.testing.models import make_odd_models as make_odd_models
from mergestream.testing.models import make_store as make_store
from mergestream.testing.models import merged_in_memory as merged_in_memory
from mergestream.testing.models import pieces_of as pieces_of
from mergestream.testing.models import save_adapter as save_adapter
from mergestream.testing.models import save_models as save_models
from mergestream.testing.models import saved as saved
