"""Every sentence of docs/hangs.md is shown by a test, which is named here.

Who edits the page edits this table: a sentence that is new needs a test that would fail if it were
not so, and one that has changed may need another. A sentence that promises nothing has a reason in
the place of tests; there are to be few of these, and none that a reader relies on.
"""

# ruff: noqa: E501  (a sentence is one line, as it is compared)

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.sentences import DOCS, code_blocks, nearest, sentences

TESTS = Path(__file__).parents[1]
PAGE = (DOCS / "hangs.md").read_text()

RECOVERY = "integration/test_recovery.py::"
MISMATCH = "integration/test_mismatch.py::"
HERE = "integration/test_hangs_doc.py::"
DIAGNOSIS = "unit/test_diagnosis.py::"
FIRST_LINES = "integration/test_first_lines.py::"
CAUSE = "integration/test_cause_first.py::"
RECONNECT = "integration/test_reconnect.py::"
CONNECTIONS = "integration/test_connections.py::"
STORE = "integration/test_store.py::"
RENDER = "unit/test_render.py::"
OLD = "integration/test_old_sessions.py::"
HOSTS = "integration/test_sessions_ssh.py::"
RAS = "integration/test_nccl_ras.py::"

ALONE = f"{HERE}test_a_rank_that_is_alone_waits_and_is_told_with_what"
SLOW = f"{RECOVERY}test_a_slow_rank_is_never_cut_off_and_a_notice_says_who_it_is"
FAILING = f"{RECOVERY}test_a_failing_rank_frees_the_others"
EACH_OTHER = f"{RECOVERY}test_ranks_that_wait_for_each_other_are_freed"
NOTICE = f"{HERE}test_after_ten_seconds_a_line_says_who_waits_for_whom"
FINISHED = f"{RECOVERY}test_a_wait_that_nobody_can_end_ends_by_itself"
STOPPED = f"{RECOVERY}test_stop_ends_a_wait_for_a_rank_that_never_comes"
VERDICTS = f"{DIAGNOSIS}test_a_case_has_its_verdict"
ORDER = f"{HERE}test_ranks_that_wait_for_each_other_in_different_groups_are_freed"
MAGIC = f"{HERE}test_magics_diagnose_and_interrupt_what_was_submitted"
SUBMITTED = f"{HERE}test_what_was_submitted_can_be_diagnosed_and_is_stopped_by_interrupt"
AGAIN = f"{HERE}test_the_message_of_a_stop_says_the_same_once_more"
WHERE = f"{HERE}test_a_stop_says_where_ranks_are_that_wait_for_nobody"
HANDLED = f"{HERE}test_an_error_that_a_rank_was_handling_comes_first"
HANDLING = f"{CAUSE}test_what_a_rank_was_handling_leads"
CAUGHT = f"{CAUSE}test_what_code_catches_is_told_all_the_same"
CANNOT_BE_STOPPED = f"{HERE}test_a_rank_that_cannot_be_stopped_is_named_and_replaced_alone"
NOBODY_ANSWERS = f"{HERE}test_a_wait_is_seen_even_if_no_thread_answers"
DIAGNOSE = f"{HERE}test_diagnose_shows_the_verdict_and_a_row_for_each_rank"
REPLACED = f"{HERE}test_a_dead_rank_is_replaced_and_the_others_stay"
STACKS = f"{HERE}test_stacks_are_shown_once_for_ranks_at_the_same_place"
DEATH = f"{RECOVERY}test_a_dead_rank_is_named_and_replaced"
ERROR_FIRST = f"{HERE}test_the_error_of_a_rank_comes_first_and_the_others_are_freed"
FIRST_LINES_SAY = f"{FIRST_LINES}test_the_first_lines_say_who_in_what_and_where"
ENDED = f"{HERE}test_a_rank_that_has_ended_its_part_is_not_waited_for"
LEFT = f"{HERE}test_a_rank_that_has_left_the_group_is_not_waited_for"
LEFT_BY = (
    "integration/test_user_groups.py::test_a_rank_that_has_left_the_group_is_named_with_its_line"
)
NO_GRACE = f"{HERE}test_without_a_grace_only_what_is_certain_at_once_is_ended"
THREADS = f"{HERE}test_what_a_rank_does_between_runs_is_not_watched"
ANY_SOURCE = f"{HERE}test_a_receive_from_anyone_names_those_who_may_send"
MISMATCH_SHOWN = f"{HERE}test_a_mismatch_names_both_sides"
SYNCHRONOUS = f"{MISMATCH}test_a_mismatch_raises_and_changes_nothing_where_it_does"
ASYNCHRONOUS = f"{MISMATCH}test_an_asynchronous_mismatch_raises"
MESSAGES = f"{MISMATCH}test_a_message_that_does_not_fit_raises_on_both_ends"
NEW_GROUP = (
    f"{HERE}test_a_new_group_is_met_by_all_ranks_or_with_local_synchronization_by_its_members"
)
DEFAULTS = f"{HERE}test_what_is_compared_and_how_long_is_waited_unless_asked_otherwise"
DETAIL = f"{HERE}test_a_check_in_detail_gives_torchs_message_and_frees_the_others"
OFF = f"{HERE}test_without_a_check_nothing_is_compared_and_waits_are_said_all_the_same"
HALTED = f"{RECONNECT}test_a_rank_stopped_before_the_reconnect_is_named_and_the_next_run_goes_on"
PREVENTED = f"{HERE}test_a_group_that_cannot_be_connected_says_which_rank_prevents_it"
RESTART_MAGIC = f"{HERE}test_a_rank_is_replaced_with_variables_by_a_magic"
DATA_PARALLEL = f"{HERE}test_data_parallel_goes_on_with_its_hooks_from_the_midst_of_a_bucket"
MESH = f"{RECOVERY}test_groups_and_meshes_live_on_after_a_rebuild"
FSDP = f"{RECOVERY}test_sharded_parameters_live_on_after_a_rebuild"
UNKNOWN_GROUP = f"{HERE}test_groups_that_a_replaced_rank_does_not_know_are_named"
KEYS_AND_HANDLES = f"{HERE}test_work_handles_and_keys_of_the_store_do_not_go_on"

SENTENCES: dict[str, tuple[str, ...] | str] = {
    "Ranks wait for each other in every collective.": (ALONE,),
    "If one is late, fails or calls something else, the others wait.": (
        SLOW,
        FAILING,
        EACH_OTHER,
    ),
    "distsession says who waits for whom, ends the wait where no wait can help, and lets you end any other.": (
        NOTICE,
        FINISHED,
        STOPPED,
    ),
    "The ranks keep their variables, and the process group is connected anew.": (
        STOPPED,
        FAILING,
        FINISHED,
    ),
    "`notebooks/02_when_a_rank_fails.ipynb` in the source tree shows most of this at work.": (
        "integration/test_notebooks.py::test_a_notebook_runs_through",
    ),
    "This cell hangs, because rank 2 does something else:": (NOTICE,),
    "After ten seconds without progress a line appears below it:": (NOTICE,),
    "`ranks 0-1,3 wait in`: These ranks are blocked.": (
        NOTICE,
        VERDICTS,
    ),
    "Ranks that wait at the same place in the same operation are named together.": (
        f"{DIAGNOSIS}test_ranks_in_different_operations_have_a_sentence_each",
        NOTICE,
    ),
    "`all_reduce #1`: The operation, by the name of torch's function, and its number within its process group.": (
        ALONE,
        f"{HERE}test_operations_are_numbered_in_their_group_and_anew_once_it_is_connected_anew",
    ),
    "The numbers begin anew when the group is connected anew.": (
        f"{HERE}test_operations_are_numbered_in_their_group_and_anew_once_it_is_connected_anew",
    ),
    "For a group other than that of all ranks, its name and its ranks follow.": (
        f"{HERE}test_operations_are_numbered_in_their_group_and_anew_once_it_is_connected_anew",
        f"{DIAGNOSIS}test_an_operation_in_words",
        ORDER,
    ),
    "`(float32 [4, 2], sum)`: What it was called with: dtype, shape and reduction here; the root, the sizes or the number of elements for others.": (
        ALONE,
    ),
    "`at In[6] line 5`: The innermost line of your code, also if torch or a library made the call.": (
        f"{HERE}test_the_line_is_the_users_own_whoever_makes_the_call",
    ),
    "In a function of the notebook it is counted from the top of the cell that defines it, also in a helper function that another cell defines.": (
        MAGIC,
        "integration/test_notebook.py::test_helper_functions_of_other_cells_are_named_where_ranks_wait",
    ),
    "`for rank 2, which runs In[6] line 4`: Whom they wait for, and what it does instead.": (
        NOTICE,
        VERDICTS,
    ),
    "Here it can still come, so nothing is ended.": (
        NOTICE,
        SLOW,
    ),
    "Press Jupyter's Stop button, or Ctrl-C in a terminal.": (
        "integration/test_notebook.py::test_stop_frees_a_hung_collective_and_keeps_the_state",
        "integration/test_terminal.py::test_ctrl_c_frees_a_hung_collective",
    ),
    "For a run that was started with `submit` use `session.interrupt()` or `%session interrupt`.": (
        SUBMITTED,
        MAGIC,
    ),
    "Where no rank waits for another one, it says where each of them was, with its line of code:": (
        WHERE,
    ),
    "The error says the same once more:": (AGAIN,),
    "The next cell can use collectives at once.": (
        STOPPED,
        f"{RECOVERY}test_stop_ends_what_all_ranks_are_stuck_in",
    ),
    "A collective that waited for a rank had not begun, and its tensor is as it was.": (
        f"{HERE}test_what_waited_for_a_rank_has_not_begun",
    ),
    "One that was under way, or that was issued with `async_op=True`, may have left anything in its tensor.": "what is said not to be kept promises nothing",
    "If a rank does not come back within 0.3 seconds, the processes that the cell has started get a SIGINT, too, as they do with Ctrl-C in a terminal: the rank may wait for a program, or for the workers of a `DataLoader`.": (
        "integration/test_forks.py::test_stop_reaches_what_the_rank_waits_for",
        "integration/test_forks.py::test_stop_ends_a_wait_for_a_stuck_worker",
    ),
    "Those that were there before the cell are left alone.": (
        f"{HERE}test_stop_leaves_processes_alone_that_an_earlier_cell_has_started",
    ),
    "A cell that is run while a rank still has not come back waits for it, and a notice says why.": (
        "integration/test_forks.py::test_a_cell_after_a_stop_waits_for_a_worker_that_cannot_be_stopped",
    ),
    "The import of a library comes to its end first, for up to 20 seconds: Python cannot use a package whose import was cut off.": (
        "integration/test_signals.py::test_a_stop_lets_the_import_of_a_library_come_to_its_end",
        "unit/test_interrupter.py::test_an_import_that_takes_too_long_is_cut_off",
    ),
    "Your own files are cut off at once.": (
        "integration/test_signals.py::test_a_stop_cuts_off_the_import_of_ones_own_file",
    ),
    "Code that catches `KeyboardInterrupt` goes on.": (
        "integration/test_swallowed.py::test_code_that_goes_on_is_told_everywhere_and_ended",
    ),
    "The error, `%session` and `diagnose()` then say how often it was stopped and what it made of that, such as `stopped once, its code caught the interrupt at line 4` or that it ignores SIGINT, and what it prints comes in its own cell.": (
        "integration/test_swallowed.py::test_code_that_goes_on_is_told_everywhere_and_ended",
        "integration/test_swallowed.py::test_what_comes_late_is_shown_in_its_own_cell",
    ),
    "`%session interrupt`, or Stop in a cell that waits for it, interrupts it again; `%session interrupt --force`, or `session.interrupt(force=True)`, ends it, whatever it catches.": (
        "integration/test_swallowed.py::test_a_notebook_says_so_in_the_next_cell_and_shows_the_rest_in_its_own",
    ),
    "Ranks that C code does not give back within five seconds are replaced then, without their variables.": (
        "integration/test_swallowed.py::test_ranks_in_c_code_are_replaced",
    ),
    "Some things cannot be stopped: C code, until it returns; and a process that is itself stopped, by SIGSTOP or a debugger.": (
        CANNOT_BE_STOPPED,
        "integration/test_forks.py::test_a_cell_after_a_stop_waits_for_a_worker_that_cannot_be_stopped",
    ),
    "While C code keeps Python's lock, nothing else of its process runs.": (
        f"{RECOVERY}test_diagnose_knows_a_rank_that_holds_the_interpreter",
        NOBODY_ANSWERS,
    ),
    "The session waits for such a rank for a moment.": (
        CANNOT_BE_STOPPED,
        f"{HERE}test_a_submitted_run_with_a_rank_that_cannot_be_stopped_is_given_up",
    ),
    "The message then names the rank and the reason, and says that `session.restart([2])` replaces it alone.": (
        CANNOT_BE_STOPPED,
        f"{RECOVERY}test_a_rank_that_holds_the_interpreter_is_named_and_can_be_replaced",
    ),
    "`session.diagnose()` says what each rank does.": (
        f"{RECOVERY}test_diagnose_says_what_each_rank_does",
        DIAGNOSE,
    ),
    "It can be called while a run waits that was started with `submit`, or from another thread; in a notebook also as `%session diagnose`.": (
        SUBMITTED,
        f"{RECOVERY}test_diagnose_says_what_each_rank_does",
        MAGIC,
    ),
    "The first part is the verdict.": (
        DIAGNOSE,
        f"{RENDER}test_a_diagnosis_begins_with_its_verdict_and_shows_the_ranks_in_order",
    ),
    "The table has one row for each rank: idle, running with the line that it is at, in an operation, or dead with how it ended.": (
        DIAGNOSE,
        REPLACED,
        f"{RENDER}test_a_rank_of_a_diagnosis_has_a_line",
        f"{RECOVERY}test_diagnose_says_what_each_rank_does",
    ),
    "It also shows a process that is stopped by SIGSTOP or held by a debugger, and one that does not answer because C code keeps Python's lock.": (
        f"{RECOVERY}test_diagnose_knows_a_stopped_process",
        f"{HERE}test_a_process_that_a_debugger_holds_is_shown",
        f"{RECOVERY}test_diagnose_knows_a_rank_that_holds_the_interpreter",
    ),
    "A rank that has ended is shown as dead even if nobody has reported it yet.": (
        "integration/test_deaths.py::test_a_rank_that_dies_idle_is_told_while_the_agent_is_stopped",
    ),
    "`since` says for how long.": (
        DIAGNOSE,
        f"{RENDER}test_a_rank_of_a_diagnosis_has_a_line",
    ),
    "With NCCL 2.24 and newer, a thread of NCCL's own answers questions on each host (its RAS service).": "it says what NCCL does, and promises nothing",
    "Where it listens on the notebook's host, at `NCCL_RAS_ADDR` or its default `localhost:28028`, and belongs to you, its report is below the table: what NCCL knows of communicators, also of those that captured graphs and C++ libraries use.": (
        f"{RAS}test_a_diagnosis_has_the_report",
        f"{RAS}test_it_is_not_asked_where_it_is_not_in_use",
        f"{RAS}test_the_service_of_another_user_is_not_believed",
    ),
    "`NCCL_RAS_ENABLE=0` switches it off.": (f"{RAS}test_it_is_not_asked_where_it_is_not_in_use",),
    "(Tested with a process that speaks its protocol, not yet with NCCL on a GPU.)": (
        f"{RAS}test_a_diagnosis_has_the_report",
    ),
    "`session.diagnose(stacks=True)` or `%session diagnose --stacks` adds the Python frames of each rank's main thread, once for ranks that are at the same place.": (
        STACKS,
        MAGIC,
        f"{RENDER}test_stacks_are_shown_on_request_and_folded",
    ),
    "Ranks 0, 1 and 3 are below `all_reduce` here, and rank 2 is at": (STACKS,),
    "A rank's main thread is not disturbed: another thread of its process answers.": (
        f"{HERE}test_the_main_thread_is_not_disturbed_by_a_question",
    ),
    "What a rank waits in stands in memory that all processes share, so a deadlock is seen even if no thread answers.": (
        NOBODY_ANSWERS,
    ),
    "A rank raises or dies: Ranks that wait for it are freed.": (
        FAILING,
        DEATH,
    ),
    "Its error comes first, and its first line says who, where and why:": (
        ERROR_FIRST,
        FIRST_LINES_SAY,
        f"{FIRST_LINES}test_the_first_lines_of_a_death_say_who_and_how",
    ),
    "Ranks that only suffered have one line together at the end.": (
        ERROR_FIRST,
        f"{CAUSE}test_ranks_that_come_late_do_not_lead",
        "integration/test_many_ranks.py::test_there_is_one_cause_and_one_line",
    ),
    "So do those that come to the operation later, and those whose code catches the error and raises another one.": (
        f"{CAUSE}test_ranks_that_come_late_do_not_lead",
        "unit/test_engine_cause.py::test_who_raises_on_top_of_it_only_suffered",
    ),
    "The order is the same in `by_rank`, `first` and `first_rank` of the RunError.": (
        f"{CAUSE}test_of_several_causes_the_earliest_is_first",
        f"{CAUSE}test_ranks_that_come_late_do_not_lead",
    ),
    "Where several ranks failed by themselves, the one that did so first comes first.": (
        f"{CAUSE}test_of_several_causes_the_earliest_is_first",
        "unit/test_outcome.py::test_what_failed_long_before_comes_before_a_death",
    ),
    "If a rank runs a collective while it handles an error of its own, in an `except`, a `finally` or the end of a `with`, the others do not come to it, or call something else.": (
        HANDLED,
        HANDLING,
    ),
    "Then that error comes first, and what the ranks called, or who did not come, is said below:": (
        HANDLED,
        HANDLING,
    ),
    "An error that all ranks handle is not taken for the cause.": (
        f"{CAUSE}test_what_explains_nothing_does_not_lead",
    ),
    "Code catches the error of such a wait, or of collectives that do not match.": (CAUGHT,),
    "Then the run goes on, and a line below its output says the same.": (CAUGHT,),
    "So does what Python ignores in a `__del__`.": (CAUGHT,),
    "A rank has ended its part: No wait can help the others.": (
        FINISHED,
        VERDICTS,
    ),
    "After `hang_grace` seconds they are freed, and the run raises CollectiveHangError:": (
        ENDED,
        NO_GRACE,
    ),
    "A rank has left the group, by `destroy_process_group()` or for a group of its own.": (
        LEFT,
        LEFT_BY,
    ),
    "Whoever waits for it there is freed at once, also while that rank still runs, and is told at which line it left:": (
        LEFT,
        f"{HERE}test_while_a_rank_that_has_left_the_group_runs_the_others_are_freed",
    ),
    "Where its code has only put another group in the place of the default one, it may put that back, so this counts once it has ended its part.": (
        f"{HERE}test_who_only_has_put_the_group_away_may_come_back_to_it",
        LEFT_BY,
    ),
    "Ranks wait for each other in different groups.": (
        ORDER,
        EACH_OTHER,
    ),
    "This raises CollectiveMismatchError:": (ORDER,),
    "A slow rank is never cut off.": (SLOW,),
    "As long as a rank that is waited for runs something, it may still come.": (
        SLOW,
        f"{DIAGNOSIS}test_without_an_ended_rank_a_deadlock_is_gone",
    ),
    "A notice says who it is, and Stop ends the wait.": (
        SLOW,
        AGAIN,
    ),
    "So does the option `timeout`, which is torch's own limit for one operation, and says who did not come and where it is:": (
        f"{HERE}test_a_time_limit_names_who_did_not_come",
        f"{RECOVERY}test_an_operation_that_ran_out_of_time_leaves_a_working_group",
        "integration/test_lifecycle.py::test_options_arrive",
    ),
    "Ranks that have nothing to do: If `session[0].submit(...)` waits for a rank that nothing runs on, a later run may bring it along, so the wait goes on.": (
        f"{RECOVERY}test_a_rank_that_can_still_be_given_its_part_is_waited_for",
        f"{HERE}test_in_the_main_thread_nothing_later_can_come",
    ),
    "Where you wait for the run in the notebook's main thread, nothing later can come, and it is ended.": (
        f"{HERE}test_in_the_main_thread_nothing_later_can_come",
        f"{RECOVERY}test_a_collective_that_other_ranks_were_not_asked_for_ends_by_itself",
    ),
    "Runs that nobody waits for: The session looks after a run while somebody waits for it, with `submit` a thread of its own.": (
        f"{HERE}test_a_submitted_run_is_looked_after_too",
    ),
    "What a rank does between runs, in threads that it keeps, is not watched.": (THREADS,),
    "`dist.recv` without `src`: Any rank of the group may be the one that sends.": (
        ANY_SOURCE,
        VERDICTS,
    ),
    "The wait is ended only when none of them can do so any more, and the message names them all.": (
        FIRST_LINES_SAY,
        ANY_SOURCE,
        f"{DIAGNOSIS}test_a_message_that_is_on_its_way_is_waited_for",
    ),
    "Threads of your own: A collective that a thread waits in is ended only while the main thread waits for another thread, as in `thread.join()` or `await asyncio.to_thread(...)`, and a rank that it needs is gone.": (
        FIRST_LINES_SAY,
        f"{HERE}test_a_collective_in_a_thread_that_is_awaited_ends",
        f"{HERE}test_a_thread_is_not_ended_while_the_main_thread_does_something_else",
    ),
    "The run then fails on that rank as well, though Python only prints what a thread raises.": (
        FIRST_LINES_SAY,
    ),
    "A rank that has ended its part may still come while a thread that the cell has started runs code of yours or of `torch.distributed`: the ranks that wait for it are not cut off, and the notice says so.": (
        f"{HERE}test_a_rank_may_still_come_while_a_thread_that_it_has_started_goes_on",
        f"{DIAGNOSIS}test_a_rank_that_has_ended_its_part_may_still_come_while_a_thread_of_it_goes_on",
        "unit/test_left_threads.py::test_what_counts_is_a_thread_that_the_request_has_started",
    ),
    "Store waits: While a rank waits for a key of the session's store, such as in `store.get(...)`, notices, Stop and `diagnose` name the key, the line and what the other ranks do, any of which may set it.": (
        f"{STORE}test_stop_names_the_key_and_the_line_and_who_could_set_it",
        f"{STORE}test_diagnose_names_the_keys_and_a_later_run_may_set_them",
        f"{HERE}test_a_wait_in_the_store_is_told_in_a_notice",
    ),
    "Only where each of them has ended its part, or is blocked for good and runs no code of yours in another thread, and you wait for the run in the notebook's main thread, nobody can any more, and the wait is ended; one that was given a limit of its own never is.": (
        f"{STORE}test_a_key_that_nobody_can_set_any_more_ends_by_itself",
        f"{STORE}test_keys_for_which_all_ranks_wait_end_by_themselves",
        f"{STORE}test_a_key_that_a_thread_sets_is_waited_for",
        f"{STORE}test_a_wait_with_a_limit_of_its_own_is_not_cut_off",
        f"{DIAGNOSIS}test_nobody_can_set_a_key_once_all_others_have_ended_their_part_and_nothing_follows",
    ),
    "Of a rank that has ended its part, a thread that an earlier cell has left behind is not seen.": (
        f"{HERE}test_a_thread_that_was_left_behind_is_not_seen_to_set_a_key",
    ),
    "What waits in a store of your own counts as code that runs.": (
        f"{HERE}test_a_wait_in_a_store_of_ones_own_counts_as_code_that_runs",
    ),
    "NCCL, and what else waits on a device:  says what is different there.": "it promises nothing",
    "Several hosts: Who waits for whom is said as on one, with the same first line, and Stop, a certain deadlock, an error or a death frees ranks on all of them.": (
        f"{HOSTS}test_the_first_line_of_an_error_is_as_on_one_host",
        f"{HOSTS}test_stop_ends_a_collective_that_waits_and_a_sleep_on_other_hosts",
        "integration/test_sessions_ssh_kills.py::test_the_end_of_a_process_frees_the_others_and_is_mended",
        "integration/test_nodes.py::test_who_waits_for_whom_is_known_of_both_nodes",
    ),
    "But what compares ranks before they begin is memory that those of one host share.": (
        "integration/test_nodes.py::test_the_ranks_of_a_node_have_a_board_of_their_own",
    ),
    "Ranks of other hosts are compared a moment later: the error is the same, and tensors may have been changed by then.": (
        "integration/test_nodes.py::test_what_ranks_of_two_nodes_call_is_compared",
        f"{HOSTS}test_the_first_line_of_an_error_is_as_on_one_host",
    ),
    'With `check="strict"` ranks of all hosts meet before a collective that is waited for begins, at the cost of a round trip to the notebook\'s host.': (
        "integration/test_nodes.py::test_strict_ranks_of_several_nodes_alter_nothing_where_they_differ",
        "integration/test_nodes.py::test_strict_ranks_of_several_nodes_meet_before_each_operation",
    ),
    "The odd ranks out come first, and of what is equal nothing is said.": (
        MISMATCH_SHOWN,
        "unit/test_cause.py::test_who_called_what",
    ),
    "A collective that its caller waits for begins only when all ranks of its group have arrived, and have arrived at the same one.": (
        SYNCHRONOUS,
        f"{HERE}test_what_waited_for_a_rank_has_not_begun",
        ALONE,
    ),
    "If not, every rank raises this error, and no tensor is changed.": (
        SYNCHRONOUS,
        MISMATCH_SHOWN,
    ),
    "Asynchronous operations, sends and receives are compared as they are issued, with what others have issued by then.": (
        ASYNCHRONOUS,
        MESSAGES,
        f"{HERE}test_the_last_rank_to_come_sees_a_mismatch_of_asynchronous_operations",
    ),
    "To wait for the others there could block a correct program.": (
        f"{HERE}test_asynchronous_operations_may_be_issued_in_any_order_of_groups",
        f"{MISMATCH}test_matching_calls_are_left_alone",
    ),
    "The rank that comes later sees that they differ, and all that take part raise the error.": (
        f"{HERE}test_the_last_rank_to_come_sees_a_mismatch_of_asynchronous_operations",
        ASYNCHRONOUS,
        MESSAGES,
    ),
    "By then the earlier ones may have begun: their tensors may have changed.": "what is said not to be kept promises nothing",
    "The collectives of `DistributedDataParallel` and of functional collectives are of this kind.": (
        f"{HERE}test_functional_collectives_are_compared_as_they_are_issued",
        f"{MISMATCH}test_buckets_that_differ_raise_in_the_backward",
    ),
    "Compared are the operation, dtype, shape, reduction and root, and for `all_to_all` what each rank sends with what its peer expects.": (
        SYNCHRONOUS,
        FIRST_LINES_SAY,
    ),
    "A new group is made only when all ranks have called `dist.new_group` with the same members, also those that will not be members.": (
        NEW_GROUP,
        f"{OLD}test_a_group_that_a_rank_does_not_make_is_told",
    ),
    "One that calls it with other members is named, and one that does not call it is waited for as in a collective.": (
        NEW_GROUP,
        f"{OLD}test_a_group_made_of_other_ranks_on_one_rank_is_told",
        FIRST_LINES_SAY,
    ),
    "With `use_local_synchronization=True` only the members meet.": (NEW_GROUP,),
    "The option `check` says how:": (
        "unit/test_options.py::test_every_option_can_be_given_as_a_keyword",
    ),
    "`shared`: As above, in memory that the ranks of a host share.": (
        SYNCHRONOUS,
        "integration/test_nodes.py::test_the_ranks_of_a_node_have_a_board_of_their_own",
    ),
    "The default.": (DEFAULTS,),
    "`detail`: Through the group itself, as torch does with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.": (
        DETAIL,
        f"{MISMATCH}test_torchs_own_check_can_be_had_instead",
    ),
    "It is several times slower.": "how fast something is, is for the benchmarks: `make bench` measures it",
    "The message is torch's, and it may come on one rank only, which then frees the others.": (
        DETAIL,
    ),
    "`off`: Not at all.": (OFF,),
    "What each rank waits in is still recorded, so Stop and `diagnose` say the same.": (OFF,),
    "`make bench` measures what recording and comparing cost for a small collective, beside `detail`.": (
        "unit/test_benchmarks.py::test_the_cost_of_recording_is_measured_without_waiting",
    ),
    "`hang_grace` is the number of seconds after which a certain deadlock is ended, 2 by default.": (
        DEFAULTS,
        FINISHED,
        ENDED,
    ),
    "With 0, ranks wait until you stop them, except where a rank has failed or has left the group, or where they wait for each other.": (
        NO_GRACE,
    ),
    "To connect the group anew takes some milliseconds, with many ranks some seconds, and every rank.": (
        HALTED,
    ),
    "Where all ranks were freed before an operation had begun, the connections stay as they are, and only the numbers of operations begin anew.": (
        f"{CONNECTIONS}test_they_stay_when_everybody_is_stopped_before_an_operation",
        f"{CONNECTIONS}test_they_stay_when_a_rank_fails_or_has_finished",
    ),
    "Where one is stopped, dead or does not answer, nobody waits in it: the others are freed, their variables are kept, and the message, the status and the panel say which rank it is and what to do.": (
        HALTED,
        f"{RECONNECT}test_a_rank_stopped_in_the_midst_of_a_reconnect_frees_the_others",
        f"{RECONNECT}test_a_rank_that_does_not_answer_is_named_after_the_limit",
        f"{RECONNECT}test_a_rank_killed_during_a_reconnect_frees_the_others",
        PREVENTED,
    ),
    "Cells that need no group still run, and collectives say why they cannot begin.": (HALTED,),
    "Each later run tries to connect the group first.": (
        HALTED,
        f"{RECONNECT}test_stop_ends_a_reconnect_and_the_next_run_tries_again",
    ),
    "An attempt that fails for another reason is made again, three times in all, with a limit of ten seconds and half a second for each rank that doubles each time.": (
        f"{RECONNECT}test_a_store_that_ends_again_and_again_is_said_and_a_restart_brings_it_back",
        f"{RECONNECT}test_a_rank_that_does_not_answer_is_named_after_the_limit",
    ),
    "Stop ends it.": (f"{RECONNECT}test_stop_ends_a_reconnect_and_the_next_run_tries_again",),
    "The store in which the ranks find each other is a process of its own.": (
        f"{RECONNECT}test_a_store_that_dies_idle_is_replaced_and_told_of",
    ),
    "If it ends, another takes its place at once, and the status says so.": (
        f"{RECONNECT}test_a_store_that_dies_idle_is_replaced_and_told_of",
    ),
    "Collectives go on without it.": (f"{RECONNECT}test_collectives_go_on_without_the_store",),
    "A rank that waits for a key, or makes a group, gets an error; the group is connected anew before the next run.": (
        f"{RECONNECT}test_a_store_that_dies_in_a_run_ends_who_waits_in_it_and_nobody_else",
    ),
    "A dead rank has to be replaced before the next collective.": (
        DEATH,
        REPLACED,
    ),
    "The error says how it ended, with a signal or an exit code, and at which line:": (
        DEATH,
        REPLACED,
        "integration/test_deaths.py::test_an_end_names_its_line",
        "unit/test_monitor.py::test_a_death_says_how_the_process_ended",
    ),
    "`at In[7] line 3`: It ended there: a crash, whose Python stack follows, or `os._exit()`.": (
        "integration/test_deaths.py::test_a_crash_names_its_line",
        "integration/test_deaths.py::test_an_end_names_its_line",
    ),
    "`in all_reduce #1 (...) at In[7] line 3`: It was blocked in that operation.": (
        "integration/test_deaths.py::test_an_end_names_its_line",
        "unit/test_monitor.py::test_a_death_says_where",
    ),
    "`last seen at In[7] line 3`: It was there up to a moment before.": (
        REPLACED,
        "integration/test_deaths.py::test_an_end_names_its_line",
    ),
    "Nothing tells of a SIGKILL, so the rank's line is noted twenty times a second.": (
        REPLACED,
        "integration/test_deaths.py::test_an_end_names_its_line",
    ),
    "`while it ran In[7]`, `while it was idle`: It ended before its line was noted, or nothing ran.": (
        "integration/test_deaths.py::test_an_end_names_its_line",
        "integration/test_deaths.py::test_a_rank_that_dies_idle_says_so",
        "unit/test_monitor.py::test_a_death_says_where",
    ),
    "If the system's count of processes that it killed for want of memory rose just then, it says that as well.": (
        "integration/test_deaths.py::test_a_kill_for_want_of_memory_is_named",
        "unit/test_monitor.py::test_a_death_for_want_of_memory_is_named",
    ),
    "The count is that of the rank's memory cgroup where there is one, with its limit.": (
        "integration/test_deaths.py::test_a_kill_for_want_of_memory_is_named",
        "unit/test_oom.py::test_the_count_of_the_cgroup_decides",
        "unit/test_monitor.py::test_a_death_for_want_of_memory_tells_the_limit",
    ),
    "If the agent, the process that started the ranks, is stopped itself, it reports no death.": (
        "integration/test_deaths.py::test_a_death_is_told_while_the_agent_is_stopped",
    ),
    "The message then names it: `kill -CONT` with its pid lets it go on.": (
        "integration/test_deaths.py::test_a_death_is_told_while_the_agent_is_stopped",
    ),
    "Until then no rank can be replaced.": (
        "integration/test_deaths.py::test_a_death_is_told_while_the_agent_is_stopped",
    ),
    "or `%session restart 2 --restore model,optim`.": (
        RESTART_MAGIC,
        REPLACED,
    ),
    "The other ranks keep their processes and variables.": (REPLACED,),
    "The new one gets the variables that are named, as copies from the lowest rank that stayed.": (
        REPLACED,
    ),
    "All are copied together, so an optimizer keeps hold of its model's parameters.": (
        DEATH,
        REPLACED,
        RESTART_MAGIC,
    ),
    "What cannot be pickled, or is not there, is a RunError, and no rank is replaced.": (
        f"{RECOVERY}test_nothing_is_replaced_where_something_cannot_be_restored",
    ),
    "Shards differ from rank to rank, so they cannot come from another one: load them from a checkpoint.": (
        f"{HERE}test_a_shard_cannot_come_from_another_rank",
    ),
    "A model of FSDP2 is refused, but a DTensor by itself is not, and would be the part of the rank that it comes from.": (
        f"{HERE}test_a_shard_cannot_come_from_another_rank",
    ),
    "After a Stop, a failure or a deadlock, all processes and their variables are still there.": (
        AGAIN,
        ERROR_FIRST,
        ENDED,
        ORDER,
    ),
    "These go on without being made again:": (
        DATA_PARALLEL,
        MESH,
        FSDP,
    ),
    "`DistributedDataParallel`, with a fresh reducer: the old one may be in the midst of a bucket.": (
        DATA_PARALLEL,
        "integration/test_torch_internals.py::test_a_fresh_reducer_gives_the_right_gradients",
    ),
    "Parameters and optimizers do not change, and communication hooks are registered again.": (
        DATA_PARALLEL,
        STOPPED,
    ),
    "FSDP2 (`fully_shard`), DTensors and device meshes.": (
        FSDP,
        MESH,
    ),
    "Groups of `dist.new_group`, and functional collectives.": (MESH,),
    "These do not:": (
        UNKNOWN_GROUP,
        KEYS_AND_HANDLES,
    ),
    "A group that a replaced rank does not know: The new process has never heard of it.": (
        UNKNOWN_GROUP,
        f"{RECOVERY}test_a_group_that_a_replaced_rank_does_not_know_says_so",
    ),
    "To use it is an error:": (UNKNOWN_GROUP,),
    "This goes for the groups of a mesh of several dimensions, too.": (UNKNOWN_GROUP,),
    "Make the mesh again, and what is sharded over it.": (UNKNOWN_GROUP,),
    "Work handles (`async_op=True`) of before.": (KEYS_AND_HANDLES,),
    "Their operation is gone, and to wait for it is an error.": (KEYS_AND_HANDLES,),
    "What was in the default store: each generation has a part of its own, and that of an earlier one is deleted.": (
        KEYS_AND_HANDLES,
    ),
    "Stores that you made at the session's `MASTER_PORT`: a Stop that ends a wait in them closes their connection.": (
        f"{HERE}test_a_stop_in_a_store_at_the_sessions_port_closes_it",
    ),
}
"""Each sentence of the page, and the tests that show it; or why it promises nothing."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "distsession: ranks 0-1,3 wait in all_reduce #1 (float32 [4, 2], sum) at In[6] line 5 (for 10 s) for rank 2, which runs In[6] line 4.": (
        NOTICE,
    ),
    "KeyboardInterrupt: the run on ranks 0-3 was stopped: ranks 0-1,3 wait in all_reduce #1 (float32 [4, 2], sum) at In[6] line 5 (for 3 s) for rank 2, which runs In[6] line 4.": (
        AGAIN,
    ),
    "KeyboardInterrupt: the run on ranks 0-3 was stopped: rank 2 was at In[11] line 4 (time.sleep(60)), ranks 0-1,3 had finished their part.": (
        WHERE,
    ),
    "While rank 2 handled that, rank 2 called barrier at In[9] line 7, ranks 0-1,3 called all_reduce (float32 [4], sum) at In[9] line 5.": (
        HANDLED,
    ),
    "ranks 0-1,3 wait in all_reduce #1 (float32 [4, 2], sum) at In[6] line 5 (for 3 s) for rank 2, which runs In[6] line 4.": (
        DIAGNOSE,
    ),
    "[rank 2] (others wait for it)": (STACKS,),
    "ValueError on rank 2 (vm, cpu) at In[7] line 3: no such file: digits.npz": (ERROR_FIRST,),
    "CollectiveHangError: rank 2 did not come to barrier #1 at In[8] line 3: it finished its part without it; ranks 0-1,3 wait. No wait can help.": (
        ENDED,
    ),
    "CollectiveHangError: rank 0 left the session's group at In[9] line 3: ranks 1-3 wait in barrier #1 at In[9] line 5 for rank 0. No wait can help.": (
        LEFT,
    ),
    "CollectiveMismatchError: rank 0 waits in all_reduce #2 (float32 [4, 2], sum) at In[10] line 4, ranks 1-3 in all_reduce #2 of group 300000 (ranks 0-3) (float32 [4, 2], sum) at In[10] line 4: each waits for the other. The ranks issue their operations in different orders.": (
        ORDER,
    ),
    "CollectiveHangError: rank 2 did not come to all_reduce (float32 [4], sum) within 2 s, in which ranks 0-1,3 waited at In[7] line 2; rank 2 was at In[7] line 1.": (
        f"{HERE}test_a_time_limit_names_who_did_not_come",
    ),
    "CollectiveMismatchError: rank 2 called all_reduce with float32 [3], ranks 0-1,3 with float32 [4], at In[9] line 3.": (
        MISMATCH_SHOWN,
    ),
    "The process group is not connected: rank 1 is stopped by SIGSTOP: kill -CONT 24054 lets it go on, session.restart([1]) replaces it.": (
        PREVENTED,
        HALTED,
    ),
    "EngineDiedError: rank 2 (pid 24054) was killed by SIGKILL, last seen at In[12] line 4. session.restart([2]) replaces it; restore=[...] copies variables from a rank that stays.": (
        REPLACED,
    ),
    "CollectiveError: this process group (ranks 0-3) was made before rank 2 was replaced, which does not know it: make it again, on all ranks, with dist.new_group([0, 1, 2, 3]).": (
        UNKNOWN_GROUP,
    ),
}
"""What the page shows in code blocks marked ``text``, by the first line of each."""

MOST_REASONS = 9
"""Sentences without a test. Rather write one than raise this."""


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of a file's tests, those of classes with the class before them."""
    tree = ast.parse((TESTS / file).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return frozenset(found)


def unknown(sentence: str, table: list[str], page: list[str]) -> str:
    """What to do about a sentence of the page that the table does not have."""
    gone = [entry for entry in table if entry not in page]
    near = nearest(sentence, gone)
    text = f'docs/hangs.md says\n    "{sentence}"\nand no entry of this file does. '
    if near:
        return (
            f'{text}Is it what was\n    "{near}"\nbefore? Then look whether its tests still show '
            "it, and change the entry."
        )
    return f"{text}Name the tests that would fail if it were not so, or write one."


def outdated(entry: str, page: list[str]) -> str:
    """What to do about an entry whose sentence the page does not have."""
    near = nearest(entry, page)
    text = f'this file has an entry for\n    "{entry}"\nwhich docs/hangs.md does not say any more. '
    return f'{text}The nearest that it says is\n    "{near}"' if near else f"{text}Take it away."


def check(table: list[str], page: list[str]) -> None:
    problems = [unknown(sentence, table, page) for sentence in page if sentence not in table]
    problems += [outdated(entry, page) for entry in table if entry not in page]
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


def test_every_sentence_of_the_page_has_its_tests() -> None:
    check(list(SENTENCES), sentences(PAGE))


def test_every_example_of_the_page_has_its_tests() -> None:
    check(list(EXAMPLES), [block.splitlines()[0] for block in code_blocks(PAGE, "text")])


@pytest.mark.parametrize(
    "name",
    sorted({n for value in [*SENTENCES.values(), *EXAMPLES.values()] if not isinstance(value, str) for n in value}),
)  # fmt: skip
def test_a_test_that_is_named_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert (TESTS / file).is_file(), f"there is no file tests/{file}"
    there = names_in(file)
    near = nearest(test.replace("_", " "), [t.replace("_", " ") for t in there])
    assert test in there, f"tests/{file} has no {test}; its nearest is {near.replace(' ', '_')}"
    assert test.split("::")[-1].startswith("test_"), f"{name} is no test"


def test_no_sentence_is_without_tests_or_a_reason() -> None:
    without = [sentence for sentence, shown in SENTENCES.items() if not shown]
    assert not without, f"neither a test nor a reason: {without}"


def test_few_sentences_promise_nothing() -> None:
    reasons = {sentence: why for sentence, why in SENTENCES.items() if isinstance(why, str)}
    assert len(reasons) <= MOST_REASONS, f"more have only a reason than may: {reasons}"


def test_a_page_falls_into_its_sentences() -> None:
    page = """# A heading. Not said.

**A lead.** It says {py:class}`this <a.b.this>` and
[that](there.md#x). So `a. b` is one?

```text
Code. Not said.
```

- **First** of all.
  And more.
- Second

`term`
: What it is. What
  not.
<!-- gone -->
"""
    assert sentences(page) == [
        "A lead: It says this and that.",
        "So `a. b` is one?",
        "First of all.",
        "And more.",
        "Second",
        "`term`: What it is.",
        "What not.",
    ]
    assert code_blocks(page, "text") == ["Code. Not said."]


def test_whoever_edits_the_page_is_told_what_to_do() -> None:
    page = ["A rank waits for all others.", "A new one."]
    table = ["A rank waits for the others.", "Gone for good, whatever it was."]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(table, page)
    told = str(caught.value)
    assert 'Is it what was\n    "A rank waits for the others."' in told
    assert 'The nearest that it says is\n    "A rank waits for all others."' in told
    assert '"A new one."\nand no entry of this file does. Name the tests' in told
    assert "any more. Take it away." in told
