//! Whoever is killed while a sandbox is paused to disk or resumed: it runs, or can be resumed, or its
//! end is told.

use std::thread;
use std::time::Duration;

use harness::containerd::{Containerd, processes};
use harness::eventually;
use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sleep::{detach, resume};

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_vmm_that_is_killed_during_a_pause_leaves_a_state_or_an_end,
        a_vmm_that_is_killed_during_a_resume_leaves_a_state_or_an_end,
    ]
}

/// After how many milliseconds it is cut off. `CUBE_CUTS` takes others, with commas.
fn moments() -> Vec<Duration> {
    let text = std::env::var("CUBE_CUTS").unwrap_or_else(|_| "150,600".to_owned());
    text.split(',').map(|text| Duration::from_millis(text.parse().unwrap())).collect()
}

/// Kills all processes of that name.
fn kill_all(name: &str) -> usize {
    let found = processes(&[name]);
    for process in &found {
        let pid = process.trim_start_matches("/proc/").split(' ').next().unwrap();
        let _ = kill(Pid::from_raw(pid.parse().unwrap()), Signal::SIGKILL);
    }
    found.len()
}

/// Calls `ctr tasks`, and kills somebody after a while.
fn cut(containerd: &Containerd, word: &str, id: &str, moment: Duration, victim: &str) -> usize {
    thread::scope(|scope| {
        let call = scope.spawn(|| containerd.ctr(["tasks", word, id]));
        thread::sleep(moment);
        let killed = kill_all(victim);
        call.join().unwrap();
        killed
    })
}

/// Whatever containerd is told is so, and what is left can go on.
fn assert_truth(containerd: &Containerd, id: &str, killed: usize) {
    eventually("it is no longer in between", || {
        let state = containerd.state(id);
        // Killed after it was resumed: its end is about to be told.
        let lost = state.as_deref() == Some("RUNNING") && processes(&["cube-vmm"]).is_empty();
        state.as_deref() != Some("PAUSING") && !lost
    });
    let state = containerd.state(id);
    match state.as_deref() {
        Some("PAUSED") => {
            assert_eq!(containerd.asleep().len(), 1);
            resume(containerd, id);
        }
        Some("RUNNING") => {}
        Some("STOPPED") => {
            assert!(killed > 0);
            assert_eq!(containerd.asleep(), Vec::<String>::new());
            return;
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(containerd.exec(id, "on", &["echo", "on"]).output(0), "on\n");
}

fn a_vmm_that_is_killed_during_a_pause_leaves_a_state_or_an_end() {
    let containerd = Containerd::start();
    for moment in moments() {
        detach(&containerd, "cut", &[], "sleep 1000");
        let killed = cut(&containerd, "pause", "cut", moment, "cube-vmm");
        assert_truth(&containerd, "cut", killed);
        containerd.remove("cut");
    }
}

fn a_vmm_that_is_killed_during_a_resume_leaves_a_state_or_an_end() {
    let containerd = Containerd::start();
    for moment in moments() {
        detach(&containerd, "cut", &[], "sleep 1000");
        containerd.ctr(["tasks", "pause", "cut"]).output(0);
        let killed = cut(&containerd, "resume", "cut", moment, "cube-vmm");
        assert_truth(&containerd, "cut", killed);
        containerd.remove("cut");
    }
}
