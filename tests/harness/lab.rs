//! The main function of tests that need real guests. They run here if this machine's KVM runs Linux
//! guests, and in the lab otherwise, without the person doing anything.

use std::io::{self, Seek as _};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{env, fs, thread};

use libtest_mimic::{Arguments, Trial};

use crate::artifacts::{Artifact, may_skip, repository, tell_skipped};

/// Seconds that a bundle of trials may take in the lab, if [`LAB_TIMEOUT_VARIABLE`] does not say. Most need
/// three minutes on an idle machine.
const LAB_TIMEOUT: &str = "1200";
const LAB_TIMEOUT_VARIABLE: &str = "CUBE_LAB_TIMEOUT";

/// Trials that one lab runs: enough that its start is little of the time, few enough that the processors
/// have something to do up to the end, and that one lab that goes down takes little with it.
const BUNDLE: usize = 12;

/// The groups that a lab runs, which is told to the program in it.
const GROUPS_VARIABLE: &str = "CUBE_GROUPS";

/// Makes the list of a module's tests, by name.
#[macro_export]
macro_rules! trials {
    ($($name:ident),* $(,)?) => {
        vec![$($crate::lab::trial(module_path!(), stringify!($name), $name)),*]
    };
}

/// A test of a module, called as cargo's own would be. With `CUBE_TEST_TIMES` set it tells how long
/// it took.
pub fn trial(module: &str, name: &str, test: fn()) -> Trial {
    let within = module.split_once("::").map_or("", |(_, within)| within);
    let path = if within.is_empty() { name.to_owned() } else { format!("{within}::{name}") };
    Trial::test(path.clone(), move || {
        let started = Instant::now();
        test();
        if env::var_os("CUBE_TEST_TIMES").is_some() {
            eprintln!("{:8.2} s  {path}", started.elapsed().as_secs_f64());
        }
        Ok(())
    })
}

/// Runs the trials, here or in the lab. They need `cube-vmm`, the kernel and the root image.
pub fn run_here_or_in_lab(mut trials: Vec<Trial>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    if let Ok(groups) = env::var(GROUPS_VARIABLE) {
        trials.retain(|trial| groups.split(' ').any(|wanted| wanted == group(trial)));
    }
    if arguments.list {
        return libtest_mimic::run(&arguments, trials).exit_code();
    }
    for artifact in [Artifact::Vmm, Artifact::Kernel, Artifact::Initrd] {
        let Err(message) = artifact.find() else { continue };
        if may_skip(artifact.name()) {
            tell_skipped("all tests that need a guest", &message);
            return ExitCode::SUCCESS;
        }
        eprintln!("{message}, or leave the tests out with CUBE_ALLOW_SKIP={}", artifact.name());
        return ExitCode::FAILURE;
    }
    if env::var_os("LAB").is_none() && !hypervisor::doctor::examine().runs_linux() {
        return in_labs(&arguments, &trials);
    }
    // A guest keeps a processor busy while it boots, and so does what a test does beside it.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// What `tests/lab/run` exits with when the lab itself has failed, not what ran in it.
const LAB_FAILED: i32 = 125;
/// Labs that are tried. A machine that goes down, or hangs, says nothing about what was tested on it;
/// it is told. Failures of tests are never tried again.
const LABS: u32 = 2;

/// The module of a trial.
fn group(trial: &Trial) -> &str {
    trial.name().split_once("::").map_or("", |(group, _)| group)
}

/// Puts groups together for a lab each, the largest first so that none is left alone at the end.
fn bundles(trials: &[Trial]) -> Vec<String> {
    let mut groups: Vec<(usize, &str)> = Vec::new();
    for trial in trials {
        match groups.last_mut() {
            Some((size, name)) if *name == group(trial) => *size += 1,
            _ => groups.push((1, group(trial))),
        }
    }
    let mut bundles: Vec<(usize, String)> = Vec::new();
    for (size, name) in groups {
        match bundles.last_mut() {
            Some((all, names)) if *all + size <= BUNDLE => {
                *all += size;
                names.extend([" ", name]);
            }
            _ => bundles.push((size, name.to_owned())),
        }
    }
    bundles.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
    bundles.into_iter().map(|(_, names)| names).collect()
}

/// Runs the groups of trials in a few labs; trials that were chosen by name all in one.
fn in_labs(arguments: &Arguments, trials: &[Trial]) -> ExitCode {
    eprintln!("no KVM that runs Linux guests here (see cube-vmm doctor): running in the lab");
    if arguments.filter.is_some() || !arguments.skip.is_empty() {
        return if in_lab(None, Told::AtOnce) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let labs = labs_at_once();
    let told = if labs > 1 { Told::AtTheEnd } else { Told::AtOnce };
    let (waiting, failed) = (Mutex::new(bundles(trials).into_iter()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let Some(groups) = lock(&waiting).next() else { return };
            eprintln!("in the lab: {groups}");
            if !in_lab(Some(&groups), told) {
                lock(&failed).push(groups);
            }
        }
    };
    thread::scope(|scope| (0..labs).for_each(|_| drop(scope.spawn(work))));
    let failed = lock(&failed);
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Labs that run beside each other: `CUBE_LABS`, or as many as there are processors and memory for,
/// and no more than two, since tests measure time in them.
fn labs_at_once() -> usize {
    if let Some(count) = env::var("CUBE_LABS").ok().and_then(|text| text.parse().ok()) {
        return std::cmp::max(count, 1);
    }
    const MEMORY: u64 = 7 << 20; // KiB that a lab may come to take
    let read = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = read
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let free: u64 = free.and_then(|text| text.parse().ok()).unwrap_or(0);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors.min(usize::try_from(free / MEMORY).unwrap_or(1)).clamp(1, 2)
}

/// When the output of a lab is shown.
#[derive(Clone, Copy, PartialEq)]
enum Told {
    AtOnce,
    AtTheEnd,
}

/// Runs this again in the lab; a lab that goes down is replaced by a new one.
fn in_lab(groups: Option<&str>, told: Told) -> bool {
    let lab = repository().join("tests/lab/run");
    let exe = match env::current_exe() {
        Ok(exe) => exe,
        Err(error) => {
            eprintln!("the path of this program is unknown: {error}");
            return false;
        }
    };
    for attempt in 1..=LABS {
        let mut command = Command::new(&lab);
        let timeout = env::var(LAB_TIMEOUT_VARIABLE).unwrap_or_else(|_| LAB_TIMEOUT.to_owned());
        command.args(["--timeout", &timeout, "--"]).arg(&exe);
        command.args(env::args_os().skip(1)).envs(groups.map(|groups| (GROUPS_VARIABLE, groups)));
        match ended(&mut command, told) {
            Ok(status) if status.code() == Some(LAB_FAILED) && attempt < LABS => {
                eprintln!(
                    "the lab itself failed (attempt {attempt} of {LABS}): once more from the start"
                );
            }
            Ok(status) => return status.success(),
            Err(error) => {
                eprintln!("{} cannot be run: {error}", lab.display());
                return false;
            }
        }
    }
    false
}

/// Runs it to its end. What it says is shown at once, or in one piece when it has ended.
fn ended(command: &mut Command, told: Told) -> io::Result<ExitStatus> {
    if told == Told::AtOnce {
        return command.status();
    }
    let mut said = tempfile::tempfile()?;
    let status = command.stdout(said.try_clone()?).stderr(said.try_clone()?).status();
    said.rewind()?;
    io::copy(&mut said, &mut io::stderr().lock())?;
    status
}
