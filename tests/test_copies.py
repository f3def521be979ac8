"The copies of a Learner that check_accum trains"
from common import *
from fastxtend_accum.checking.copies import copy_learner


def test_a_copy_shares_no_tensor():
    learn = fit(make_learner(8, opt_func=Adam), 1)
    copied = copy_learner(learn, [])
    mine = {p.data_ptr() for p in learn.model.parameters()}
    others = {p.data_ptr() for p in copied.model.parameters()}
    assert mine and mine.isdisjoint(others)
    before = weights(learn)
    copied.fit(1, .1)
    assert_same(weights(learn), before)
    assert_apart(weights(copied), before)
