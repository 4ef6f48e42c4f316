"""The checks that decide what a submission is worth: why a rollout can be believed.

Read in this order:

- `findings`    what a check says, and what a list of findings amounts to
- `limits`      default thresholds per dtype, and how a measurement is graded against them
- `context`     what is known about a unit besides its file; the names of the checks
- `admission`   checks 1 to 3: envelope, standing, window; on plain inputs, before any file is opened
- `file`        check 4: hash, size, Parquet, schema, metadata
- `assignment`  check 5: the prompts are those of S
- `tokens`      checks 6 and 7: the rows' tokens and how they end
- `reward`      check 9: rewards recomputed from the tokens
- `commitment`  check 10: TOPLOC
- `sampling`    check 11: the tokens are those that the seeds draw
- `improbable`  check 11, second half: and no less probable than chance allows
- `drift`       check 12: the worker's log-probs against the validator's
- `pipeline`    all of them in order, up to a judgement
- `measures`    the worst values that checks 10 to 12 saw, also where nothing is wrong
- `audit_share` which units get checks 10 to 12, who draws them, and how the draw is committed to
- `audit_draws` whether a published version was audited as its draws demand

Check 8 of the design (a completion equal to another node's) is a remark for the dashboard, made where other
nodes' submissions are known (the coordinator's `duplicates`); it decides nothing.
"""
