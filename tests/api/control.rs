//! Pause and resume, and requests that are not legal.

use std::time::{Duration, Instant};

use guest_protocol::Spawn;
use harness::{Step, TestVm, eventually, image, lifecycle, sh};
use hypervisor::api::{ErrorKind, Reply, Request, StopHow};
use hypervisor::disks::DiskEngine;
use hypervisor::state::VmState;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_paused_guest_stands_still,
        the_command_line_pauses_and_resumes,
        illegal_requests_are_refused_with_their_kind,
        a_command_asked_for_during_a_pause_comes_after_it,
        a_paused_vm_can_be_stopped,
        info_tells_the_engine_of_each_disk,
        a_guest_answers_after_every_pause,
        output_survives_many_pauses,
        disk_contents_survive_many_pauses,
        pauses_leave_no_descriptors,
    ]
}

fn a_paused_guest_stands_still() {
    let vm = TestVm::builder().cpus(2).boot();
    let counter = "i=0; while :; do i=$((i+1)); echo $i; done";
    let counting = vm.start(Spawn::new(sh(counter)));
    counting.stdout.wait_for("\n100\n");
    vm.ask(&Request::Pause {});
    assert_eq!(vm.info().state, VmState::Paused);
    // What was on its way arrives.
    std::thread::sleep(Duration::from_millis(300));
    let at_pause = counting.stdout.so_far().len();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(counting.stdout.so_far().len(), at_pause);
    vm.ask(&Request::Resume {});
    assert_eq!(vm.info().state, VmState::Running);
    eventually("the guest goes on", || counting.stdout.so_far().len() > at_pause);
}

fn the_command_line_pauses_and_resumes() {
    let vm = TestVm::boot();
    vm.cli("pause", &[]).end().output(0);
    assert_eq!(vm.info().state, VmState::Paused);
    vm.cli("pause", &[]).end().assert_refused(&["pause is not legal while the VM is paused"]);
    vm.cli("resume", &[]).end().output(0);
    assert_eq!(vm.exec(["echo", "on"]).text(), "on");
    vm.cli("resume", &[]).end().assert_refused(&["resume is not legal while the VM is running"]);
}

fn illegal_requests_are_refused_with_their_kind() {
    let vm = TestVm::boot();
    let kind = |request| match vm.request(&request) {
        Reply::Error { kind, .. } => kind,
        reply => panic!("{request:?} was answered with {reply:?}"),
    };
    assert_eq!(kind(Request::Resume {}), ErrorKind::Illegal);
    vm.ask(&Request::Pause {});
    assert_eq!(kind(Request::Pause {}), ErrorKind::Illegal);
    assert_eq!(vm.info().state, VmState::Paused);
    vm.ask(&Request::Resume {});
    assert_eq!(vm.info().state, VmState::Running);
}

fn a_guest_answers_after_every_pause() {
    let vm = TestVm::builder().cpus(2).boot();
    lifecycle(&vm, &[Step::PauseResume; 5], |vm| {
        assert_eq!(vm.exec(["echo", "here"]).text(), "here");
        assert_eq!(vm.exec(["nproc"]).text(), "2");
    });
}

/// Pauses and resumes while something has not ended; how often.
#[track_caller]
fn pause_until(vm: &TestVm, ended: impl Fn() -> bool) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut times = 0;
    while !ended() {
        assert!(Instant::now() < deadline, "it has not ended in 300 s and {times} pauses");
        vm.ask(&Request::Pause {});
        std::thread::sleep(Duration::from_millis(5));
        vm.ask(&Request::Resume {});
        std::thread::sleep(Duration::from_millis(15));
        times += 1;
    }
    times
}

fn output_survives_many_pauses() {
    let vm = TestVm::builder().cpus(2).boot();
    // In steps, so that it takes long enough on fast hosts and ends on slow ones.
    let line = "read go; for i in $(seq 0 99); do seq $((i*200+1)) $((i*200+200)); sleep 0.01; done; \
                echo end";
    let mut counting = vm.start(Spawn::new(sh(line)));
    counting.feed(b"go\n");
    let times = pause_until(&vm, || counting.stdout.so_far().ends_with(b"\nend\n"));
    let output = counting.end();
    let expected: String = (1..=20_000).map(|i| format!("{i}\n")).collect::<String>() + "end\n";
    assert!(output.stdout == expected.as_bytes(), "{} bytes came", output.stdout.len());
    assert!(times >= 20, "the VM was paused {times} times only");
}

fn disk_contents_survive_many_pauses() {
    let builder = TestVm::builder().cpus(2);
    let content = image::noise(4 << 20, 41);
    let disk = builder.place().given("disk", &content);
    let copy = builder.place().given("copy", vec![0; content.len()]);
    let vm = builder.disk(format!("path={disk},ro")).disk(format!("path={copy}")).boot();
    let line = "for i in $(seq 0 63); do dd if=/dev/vda of=/dev/vdb bs=64k count=1 skip=$i seek=$i \
                conv=fsync,notrunc 2>/dev/null; sleep 0.01; done; echo end";
    let copying = vm.start(Spawn::new(sh(line)));
    let times = pause_until(&vm, || copying.stdout.so_far().ends_with(b"end\n"));
    assert!(copying.end().status.success());
    assert!(std::fs::read(copy).unwrap() == content, "the copy differs");
    assert!(times >= 5, "the VM was paused {times} times only");
}

fn a_command_asked_for_during_a_pause_comes_after_it() {
    let vm = TestVm::boot();
    vm.ask(&Request::Pause {});
    let running = vm.cli("exec", &["--", "echo", "late"]).start();
    std::thread::sleep(Duration::from_millis(500));
    vm.ask(&Request::Resume {});
    assert_eq!(running.end().output(0), "late\n");
}

fn info_tells_the_engine_of_each_disk() {
    let builder = TestVm::builder().cpus(2);
    let [one, two] = ["one", "two"].map(|name| builder.place().given(name, [0; 4096]));
    let (slow, other) = (format!("path={one},id=slow,engine=sync,queues=1"), format!("path={two}"));
    let vm = builder.disk(slow).disk(other).boot();
    let [slow, other] = &vm.info().disks[..] else { panic!("{:?}", vm.info().disks) };
    assert_eq!((slow.id.as_str(), slow.engine, slow.queues), ("slow", DiskEngine::Sync, 1));
    assert_eq!(slow.fallback, None);
    assert_eq!(other.queues, 2);
    // Whichever it is here: one that is not the first choice has its reason.
    assert_eq!(other.engine == DiskEngine::Sync, other.fallback.is_some());
}

fn a_paused_vm_can_be_stopped() {
    let vm = TestVm::boot();
    vm.ask(&Request::Pause {});
    vm.ask(&Request::Stop { how: StopHow::PowerOff, timeout_ms: 60_000 });
    vm.end().output(0);
}

fn pauses_leave_no_descriptors() {
    let vm = TestVm::boot();
    let process = std::path::PathBuf::from(vm.pid().to_string());
    let pause = |_| {
        vm.ask(&Request::Pause {});
        vm.ask(&Request::Resume {});
    };
    (0..3).for_each(pause);
    let before = harness::census::descriptors(&process).len();
    (0..30).for_each(pause);
    assert_eq!(vm.exec(["echo", "here"]).text(), "here");
    harness::census::assert_descriptors(&process, before);
}
