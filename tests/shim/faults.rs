//! Whoever has a part in a container is killed, or stopped, in the midst of each step of its life.
//! The call that was under way ends, containerd tells the truth, all can be removed, nothing is left.
//!
//! The whole matrix takes a quarter of an hour in the lab: `CUBE_FAULTS=all` goes through it, a test
//! for each of the victims. Otherwise one test goes through a few of its cells.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Instant;

use harness::artifacts::Artifact;
use harness::containerd::{CUBE, Containerd, Said, processes};
use harness::events::Events;
use harness::{eventually, oci_image};
use libtest_mimic::Trial;
use nix::sys::signal::Signal::{self, SIGCONT, SIGKILL, SIGSTOP};
use nix::unistd::Pid;

use Step::{Boot, Create, Delete, Exec, Kill, Start};
use Victim::{Agent, Daemon, FileServer, Keeper, Shim, Vmm};

pub fn trials() -> Vec<Trial> {
    match std::env::var("CUBE_FAULTS").as_deref() {
        Ok("all") => harness::trials![
            a_shim_is_killed,
            a_vmm_is_killed,
            a_file_server_is_killed,
            an_agent_is_killed,
            a_keeper_is_killed,
            containerd_is_killed,
            a_shim_is_stopped,
            a_vmm_is_stopped,
            a_file_server_is_stopped,
            containerd_is_stopped,
            whoever_was_stopped_goes_on,
        ],
        Ok(other) => panic!("CUBE_FAULTS={other}: expected all"),
        Err(_) => harness::trials![a_fault_leaves_the_truth_and_nothing_else],
    }
}

/// A step of a container's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The call to make it: a shim has just been started.
    Create,
    /// The same: its VM boots.
    Boot,
    Start,
    Exec,
    Kill,
    Delete,
}

const ALL: [Step; 6] = [Create, Boot, Start, Exec, Kill, Delete];

/// Who is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Shim,
    Vmm,
    FileServer,
    Daemon,
    /// PID 1 of the guest.
    Agent,
    /// `cube-oci`, which keeps a container in the guest.
    Keeper,
}

impl Victim {
    /// Its processes on the host.
    fn processes(self, containerd: &Containerd) -> Vec<i32> {
        let name = match self {
            Shim => "containerd-shim-cube",
            Vmm => "cube-vmm",
            FileServer => "cube-fsd",
            Daemon => return vec![containerd.pid().cast_signed()],
            Keeper | Agent => return Vec::new(),
        };
        let pid = |line: String| line.split(['/', ' ']).nth(2).unwrap().parse().unwrap();
        processes(&[name]).into_iter().map(pid).collect()
    }

    /// Waits until it is there, and sends it a signal; in a removal, which it does not outlive, only if
    /// it is there still.
    fn strike(self, containerd: &Containerd, signal: Signal, step: Step) {
        match self {
            Keeper => in_guest("kill -KILL $(pidof cube-oci)"),
            // What its death is to a kernel, which takes no signal for PID 1.
            Agent => in_guest("echo c > /proc/sysrq-trigger"),
            _ => {
                let is_there = || step == Delete || !self.processes(containerd).is_empty();
                eventually("the victim is there", is_there);
                for pid in self.processes(containerd) {
                    // It may be on its way out.
                    let _ = nix::sys::signal::kill(Pid::from_raw(pid), signal);
                }
            }
        }
    }
}

/// Runs a command in the only guest, outside of its container.
fn in_guest(command: &str) {
    let sandbox = fs::read_dir("/run/cube").unwrap().flatten().find(|entry| entry.path().is_dir());
    let socket = sandbox.unwrap().path().join("api.sock");
    let mut call = Command::new(Artifact::Vmm.arg());
    call.args(["exec", "--api-socket"]).arg(socket).args(["--", "sh", "-c", command]);
    Said::of(call, b"");
}

/// The victims of one containerd, one after the other.
struct Matrix {
    containerd: Containerd,
    events: Events,
    cells: usize,
}

/// One container, and what was struck in which step of it.
struct Cell {
    id: String,
    what: String,
    /// The call that was under way.
    call: JoinHandle<Said>,
    struck: Instant,
}

impl Matrix {
    fn new() -> Self {
        let containerd = Containerd::start();
        let events = Events::listen(&containerd);
        Self { containerd, events, cells: 0 }
    }

    /// A new container, by its name, just before that step.
    fn prepare(&mut self, step: Step) -> String {
        self.cells += 1;
        let id = format!("struck{}", self.cells);
        if !matches!(step, Create | Boot | Start) {
            self.containerd.detach(&id, &["sleep", "100000"]);
            assert_grouped(&id);
        }
        if step == Delete {
            self.containerd.ctr(["tasks", "kill", "-s", "SIGKILL", &id]).output(0);
            self.events.wait(&id, "exit");
        }
        id
    }

    /// Takes a container to the step, and strikes when that is under way.
    fn strike(&self, id: &str, victim: Victim, signal: Signal, step: Step) -> Cell {
        let containerd = &self.containerd;
        // The time that a client needs for a call that does nothing.
        let asked = Instant::now();
        containerd.ctr(["version"]).output(0);
        let client = asked.elapsed();
        let words: &[&str] = match step {
            Create | Boot | Start => {
                &["run", "-d", "--runtime", CUBE, oci_image::NAME, id, "sleep", "100000"]
            }
            // Names of processes are free again when those have ended.
            Exec => &["tasks", "exec", "--exec-id", "e", id, "sleep", "1"],
            Kill => &["tasks", "kill", "-s", "SIGKILL", id],
            Delete => &["tasks", "rm", id],
        };
        let command = containerd.command(words.iter().copied());
        let call = std::thread::spawn(move || Said::of(command, b""));
        match step {
            Create => eventually("a shim", || !Shim.processes(containerd).is_empty()),
            Boot => eventually("a VM boots", || !FileServer.processes(containerd).is_empty()),
            Start => self.events.wait(id, "create"),
            Exec | Kill => std::thread::sleep(client),
            // It is over soon.
            Delete => std::thread::sleep(client / 2),
        }
        victim.strike(containerd, signal, step);
        let what = format!("{victim:?} {signal} in {step:?}");
        Cell { id: id.to_owned(), what, call, struck: Instant::now() }
    }

    /// Does what a person does who wants all of it gone, and looks that it is, and was told.
    #[track_caller]
    fn remove(&self, cell: &Cell) {
        let (id, containerd) = (cell.id.as_str(), &self.containerd);
        let known = cell.struck.elapsed();
        containerd.ctr(["tasks", "kill", "-s", "SIGKILL", id]);
        eventually(&format!("{}: the task ends", cell.what), || {
            !matches!(containerd.state(id).as_deref(), Some("RUNNING" | "CREATED" | "PAUSED"))
        });
        let ended = cell.struck.elapsed();
        containerd.ctr(["tasks", "rm", "-f", id]);
        containerd.ctr(["containers", "rm", id]);
        let list = containerd.ctr(["containers", "ls", "-q"]);
        assert_eq!(list.output(0), "", "{}", cell.what);
        containerd.assert_clean();
        let removed = cell.struck.elapsed();
        if self.events.of(id).iter().any(|topic| topic == "start") {
            self.events.wait(id, "exit");
        }
        if std::env::var_os("CUBE_TEST_TIMES").is_some() {
            let seconds =
                [known, ended, removed].map(|time| format!("{:.1} s", time.as_secs_f64()));
            let [known, ended, removed] = seconds;
            eprintln!("{}: known after {known}, ended {ended}, removed {removed}", cell.what);
        }
    }

    /// The container does not outlive the victim, and that is known without a word from anybody.
    #[track_caller]
    fn ends(&mut self, victim: Victim, step: Step) {
        let id = self.prepare(step);
        let cell = self.strike(&id, victim, SIGKILL, step);
        eventually(&format!("{}: it is known", cell.what), || {
            matches!(self.containerd.state(&cell.id).as_deref(), None | Some("STOPPED"))
        });
        self.remove(&cell);
        cell.call.join().unwrap();
    }

    /// The container goes on, if it was not about to end.
    #[track_caller]
    fn goes_on(&mut self, victim: Victim, step: Step) {
        let id = self.prepare(step);
        let cell = self.strike(&id, victim, SIGKILL, step);
        self.assert_true(&cell);
        self.remove(&cell);
        cell.call.join().unwrap();
    }

    /// What is said to run does.
    #[track_caller]
    fn assert_true(&self, cell: &Cell) {
        let runs = || self.containerd.state(&cell.id).as_deref() == Some("RUNNING");
        if runs() {
            let said = self.containerd.exec(&cell.id, "look", &["echo", "here"]);
            assert!(said.stdout == "here\n" || !runs(), "{}: {said:?}", cell.what);
        }
    }

    fn restart(&mut self) {
        self.containerd.stop_daemon();
        self.containerd.start_daemon();
        self.events = Events::listen(&self.containerd);
    }

    /// containerd is killed: the next one knows what is there.
    #[track_caller]
    fn is_known_to_the_next(&mut self, step: Step) {
        let id = self.prepare(step);
        let cell = self.strike(&id, Daemon, SIGKILL, step);
        self.restart();
        eventually(&format!("{}: it is known, or over", cell.what), || {
            self.containerd.state(&id).is_some() || Shim.processes(&self.containerd).is_empty()
        });
        self.assert_true(&cell);
        self.remove(&cell);
        cell.call.join().unwrap();
    }

    /// containerd cannot know that a shim has stopped for good, unless it starts anew.
    #[track_caller]
    fn is_cleared_by_a_restart(&mut self, step: Step) {
        let id = self.prepare(step);
        let cell = self.strike(&id, Shim, SIGSTOP, step);
        self.restart();
        eventually(&format!("{}: it is known", cell.what), || {
            self.containerd.state(&cell.id).is_none()
        });
        self.remove(&cell);
        cell.call.join().unwrap();
    }

    /// It can be killed and removed at once, whatever hangs.
    #[track_caller]
    fn can_be_removed(&self, id: &str, victim: Victim, step: Step) {
        let cell = self.strike(id, victim, SIGSTOP, step);
        self.remove(&cell);
        cell.call.join().unwrap();
    }

    /// The call that waits for it fails, and its making is undone.
    #[track_caller]
    fn fails_in_time(&mut self, victim: Victim) {
        let id = self.prepare(Boot);
        let cell = self.strike(&id, victim, SIGSTOP, Boot);
        let Cell { id, what, call, struck } = cell;
        let said = call.join().unwrap();
        assert!(said.code != 0 && !said.stderr.is_empty(), "{what}: {said:?}");
        let call = std::thread::spawn(move || said);
        self.remove(&Cell { id, what, call, struck });
    }

    /// The call ends well when the victim goes on, and so does the container.
    #[track_caller]
    fn succeeds_later(&self, id: &str, victim: Victim, step: Step) {
        let cell = self.strike(id, victim, SIGSTOP, step);
        if victim != Daemon {
            // Answered or not, containerd is there.
            self.containerd.ctr(["tasks", "ls"]);
        }
        victim.strike(&self.containerd, SIGCONT, step);
        let Cell { id, what, call, struck } = cell;
        let said = call.join().unwrap();
        // A removal tells how the task has ended.
        let told = step != Delete || said.stderr.contains("exit code 137");
        assert!(said.code == 0 && told, "{what}: {said:?}");
        let call = std::thread::spawn(move || said);
        self.assert_true(&Cell { id, what, call, struck });
    }
}

/// The VMM and the file server of a container are in a control group of their own.
#[track_caller]
fn assert_grouped(id: &str) {
    let folder = format!("/default/{id}/cube-");
    for name in ["cube-vmm", "cube-fsd"] {
        let found = processes(&[name]);
        assert!(!found.is_empty(), "no {name}");
        for process in found {
            let group = Path::new(process.split(' ').next().unwrap()).join("cgroup");
            let group = fs::read_to_string(group).unwrap();
            assert!(group.contains(&folder), "{process} is in {group}, not below {folder}");
        }
    }
}

/// The cells that everybody has time for.
fn a_fault_leaves_the_truth_and_nothing_else() {
    let mut matrix = Matrix::new();
    let id = matrix.prepare(Exec);
    matrix.succeeds_later(&id, Shim, Exec);
    matrix.can_be_removed(&id, FileServer, Exec);
    matrix.ends(Shim, Boot);
    matrix.is_known_to_the_next(Boot);
}

fn a_shim_is_killed() {
    let mut matrix = Matrix::new();
    ALL.into_iter().for_each(|step| matrix.ends(Shim, step));
}

fn a_vmm_is_killed() {
    let mut matrix = Matrix::new();
    [Boot, Start, Exec, Kill, Delete].into_iter().for_each(|step| matrix.ends(Vmm, step));
}

/// The VMM starts another, which goes on with what the guest has open.
fn a_file_server_is_killed() {
    let mut matrix = Matrix::new();
    [Boot, Start, Exec, Kill, Delete].into_iter().for_each(|step| matrix.goes_on(FileServer, step));
}

fn an_agent_is_killed() {
    let mut matrix = Matrix::new();
    [Start, Exec, Kill, Delete].into_iter().for_each(|step| matrix.ends(Agent, step));
}

fn a_keeper_is_killed() {
    let mut matrix = Matrix::new();
    [Start, Exec, Kill].into_iter().for_each(|step| matrix.ends(Keeper, step));
}

fn containerd_is_killed() {
    let mut matrix = Matrix::new();
    ALL.into_iter().for_each(|step| matrix.is_known_to_the_next(step));
}

fn a_shim_is_stopped() {
    let mut matrix = Matrix::new();
    ALL.into_iter().for_each(|step| matrix.is_cleared_by_a_restart(step));
}

fn a_vmm_is_stopped() {
    can_be_removed_in_each_step(Vmm);
}

fn a_file_server_is_stopped() {
    can_be_removed_in_each_step(FileServer);
}

fn can_be_removed_in_each_step(victim: Victim) {
    let mut matrix = Matrix::new();
    matrix.fails_in_time(victim);
    for step in [Start, Exec, Kill, Delete] {
        let id = matrix.prepare(step);
        matrix.can_be_removed(&id, victim, step);
    }
}

fn containerd_is_stopped() {
    goes_on_from_each_step(Daemon);
}

fn whoever_was_stopped_goes_on() {
    [Shim, Vmm, FileServer].into_iter().for_each(goes_on_from_each_step);
}

/// One container, whose making, starting and ending is interrupted.
fn goes_on_from_each_step(victim: Victim) {
    let mut matrix = Matrix::new();
    for first in [Boot, Start] {
        let id = matrix.prepare(first);
        for step in [first, Exec, Kill] {
            matrix.succeeds_later(&id, victim, step);
        }
        matrix.events.wait(&id, "exit");
        matrix.succeeds_later(&id, victim, Delete);
        matrix.containerd.ctr(["containers", "rm", &id]).output(0);
        matrix.containerd.assert_clean();
    }
}
