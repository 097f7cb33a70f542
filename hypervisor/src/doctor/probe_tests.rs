//! What the probes' outcomes mean, without a `/dev/kvm`.

use kvm_bindings::kvm_regs;

use super::super::programs::CODE;
use super::*;

const MS10: Duration = Duration::from_millis(10);

fn ended(end: End) -> Outcome {
    let regs = Some(kvm_regs { rip: CODE, ..Default::default() });
    Outcome { end, regs, as_expected: true, times: vec![MS10] }
}

fn seen(name: &'static str, ran: Ran) -> Probe {
    Probe { name, ran, decisive: true, detail: Some("detail".to_owned()) }
}

fn int3() -> &'static Program {
    PROGRAMS.iter().find(|program| program.name == "int3").unwrap()
}

const FAST: Speed = Speed { instructions: 1, cpu_ns: 1, instructions_per_second: 3_000_000_000 };
const SLOW: Speed = Speed { instructions: 1, cpu_ns: 1, instructions_per_second: 4_000_000 };

#[test]
fn a_program_that_halts_with_its_effect_ran() {
    assert_eq!(judge(int3(), &ended(End::Halted)).ran, Ran::Yes);
}

#[test]
fn a_program_that_halts_without_its_effect_failed() {
    let probe = judge(int3(), &Outcome { as_expected: false, ..ended(End::Halted) });
    assert_eq!(probe.ran, Ran::No);
    assert_eq!(probe.detail.unwrap(), "halted without the expected effect at 'int3'");
}

#[test]
fn every_odd_end_is_told_with_its_datum() {
    let detail = |end| judge(int3(), &ended(end)).detail.unwrap();
    assert_eq!(detail(End::InternalError(1)), "KVM_EXIT_INTERNAL_ERROR, suberror 1 at 'int3'");
    assert_eq!(
        detail(End::FailEntry(0x80000021)),
        "KVM_EXIT_FAIL_ENTRY, reason 0x80000021 at 'int3'"
    );
    assert_eq!(detail(End::Shutdown), "triple fault (KVM_EXIT_SHUTDOWN) at 'int3'");
    assert_eq!(detail(End::Fault(6)), "exception 6 at 'int3'");
    assert_eq!(detail(End::RunFailed(14)), "KVM_RUN failed with errno 14 at 'int3'");
    assert_eq!(detail(End::NotSetUp("KVM_CREATE_VM", 12)), "KVM_CREATE_VM failed with errno 12");
}

#[test]
fn a_loop_kicked_in_its_first_part_has_the_speed_of_what_it_did() {
    let regs = Some(kvm_regs { rcx: PART_ITERATIONS - 20_000, ..Default::default() });
    let outcome = Outcome { regs, ..ended(End::OutOfTime) };
    let speed = speed(&outcome).unwrap();
    assert_eq!((speed.instructions, speed.instructions_per_second), (40_000, 4_000_000));
    assert_eq!(judge_loop(&outcome, Some(speed)).ran, Ran::Yes);
}

#[test]
fn the_fastest_part_of_a_loop_counts() {
    let times = vec![4 * MS10, 5 * MS10, 9 * MS10, 10 * MS10];
    let speed = speed(&Outcome { times, ..ended(End::Halted) }).unwrap();
    assert_eq!(speed.instructions, 3 * PART_INSTRUCTIONS);
    assert_eq!(speed.cpu_ns, 100_000_000);
    assert_eq!(speed.instructions_per_second, 100_000_000);
}

#[test]
fn a_loop_that_failed_or_never_began_has_no_speed() {
    assert_eq!(speed(&ended(End::InternalError(1))), None);
    assert_eq!(speed(&ended(End::OutOfTime)), None);
    assert_eq!(speed(&ended(End::Stuck)), None);
    assert_eq!(judge_loop(&ended(End::OutOfTime), None).ran, Ran::No);
}

#[test]
fn all_ran_and_fast_is_hardware() {
    let probes = [seen("int3", Ran::Yes), seen("vex", Ran::NotOffered)];
    assert_eq!(verdict(&probes, Some(FAST)), Verdict::Hardware);
}

#[test]
fn a_slow_loop_alone_is_interpreting() {
    let reason = "4.0 million instructions per second".to_owned();
    let probes = [seen("int3", Ran::Yes)];
    assert_eq!(verdict(&probes, Some(SLOW)), Verdict::Interpreting { reason });
}

#[test]
fn one_missing_instruction_alone_is_interpreting() {
    let probes = [seen("long-mode", Ran::Yes), seen("int3", Ran::No)];
    let reason = "int3: detail".to_owned();
    assert_eq!(verdict(&probes, Some(FAST)), Verdict::Interpreting { reason });
}

#[test]
fn what_linux_can_do_without_decides_nothing() {
    let vex = Probe { decisive: false, ..seen("vex", Ran::No) };
    assert_eq!(verdict(&[seen("int3", Ran::Yes), vex], Some(FAST)), Verdict::Hardware);
}

#[test]
fn nothing_ran_is_none() {
    let probes = [seen("real-mode", Ran::No), seen("long-mode", Ran::No)];
    let reason = "real-mode: detail".to_owned();
    assert_eq!(verdict(&probes, None), Verdict::None { reason });
}

#[test]
fn what_was_not_tried_is_never_called_hardware() {
    let untried = Probe { detail: None, ..seen("loop", Ran::NotTried) };
    let reason = "loop: no time was left to try it".to_owned();
    let probes = [seen("int3", Ran::Yes), untried];
    assert_eq!(verdict(&probes, None), Verdict::Interpreting { reason });
}

#[test]
fn the_verdict_is_flat_in_json() {
    let json = serde_json::to_value(Verdict::None { reason: "x".to_owned() }).unwrap();
    assert_eq!(json, serde_json::json!({"verdict": "none", "reason": "x"}));
    let json = serde_json::to_value(Verdict::Hardware).unwrap();
    assert_eq!(json, serde_json::json!({"verdict": "hardware"}));
}
