"""What is left over in a bucket, where nobody knows whether a writer is still at work.

A step in the making has a plan, which names the commit that its writer has read. Once there is another commit that
writer cannot win any more, and what it has written can go.
"""

from __future__ import annotations

from collections.abc import Collection

from mergestream.store.manifest import Manifest
from mergestream.store.mirror import JOURNAL, PLAN, Mirror


def tidy_bucket(
    store: Mirror, manifest: Manifest, steps: Collection[str], experts: Collection[str], lost: str | None
) -> None:
    """Remove all folders but these, as far as nobody can make them count.

    What can be resumed stays, unless it was: if its writer has read the commit ``lost``, and whoever it was where that
    is None.
    """
    store.look()
    found = {folder: store.plan(folder) for folder in store.folders("steps")}
    done = [{**plan, "commit": None} for folder, plan in found.items() if plan and folder in steps]
    plans = {folder: plan for folder, plan in found.items() if folder not in steps}
    if not store.is_current():  # asked last: who has read this manifest by now is found among the plans
        return
    spared = {folder for folder, plan in plans.items() if plan and plan.get("commit") == manifest.commit}
    after = None, [entry.digest for entry in manifest.history]
    spared |= {
        folder
        for folder, plan in plans.items()
        if plan and plan.get("after", ()) in after and lost in (None, plan.get("commit"))
        if {**plan, "commit": None} not in done
    }
    store.remove([f"steps/{folder}" for folder in plans if folder not in spared])
    store.remove([f"experts/{folder}" for folder in store.folders("experts") if folder not in {*experts, *spared}])
    for folder in steps:
        names = [name for name in store.objects(f"steps/{folder}") if name == PLAN or name.startswith(JOURNAL)]
        store.bucket.delete(f"steps/{folder}/{name}" for name in names)
