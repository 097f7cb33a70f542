//! The main function of tests that need real guests. They run here if this machine's KVM runs Linux
//! guests, and in the lab otherwise, without the person doing anything.

use std::env;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};

use crate::artifacts::{Artifact, may_skip, repository, tell_skipped};

/// Seconds that a whole target may take in the lab.
const LAB_TIMEOUT: &str = "1500";

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
        run_as_often_as_the_lab_needs(&path, test);
        if env::var_os("CUBE_TEST_TIMES").is_some() {
            eprintln!("{:8.2} s  {path}", started.elapsed().as_secs_f64());
        }
        Ok(())
    })
}

/// Times that a test is run in the lab before its failure counts.
const TRIES_IN_THE_LAB: u32 = 3;

/// Runs a test: once on hardware. In the lab, where the emulated processor now and then breaks a
/// guest (a triple fault in the middle of a boot) or its host, a failure has to come back to count;
/// the one that did not is told.
fn run_as_often_as_the_lab_needs(name: &str, test: fn()) {
    let tries = if env::var_os("LAB").is_some() { TRIES_IN_THE_LAB } else { 1 };
    for attempt in 1..tries {
        if std::panic::catch_unwind(test).is_ok() {
            return;
        }
        eprintln!("{name} failed in the lab, attempt {attempt} of {tries}: once more");
    }
    test();
}

/// Runs the trials, here or in the lab. They need `cube-vmm`, the kernel and the root image.
pub fn run_here_or_in_lab(trials: Vec<Trial>) -> ExitCode {
    let mut arguments = Arguments::from_args();
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
/// Labs that are tried. The emulator's nested virtualization now and then takes its own kernel down;
/// that says nothing about what is tested, and it is told.
const LABS: u32 = 3;
/// A lab that fails later has most likely run out of its time, and would again.
const A_CRASH_COMES_WITHIN: Duration = Duration::from_secs(1200);

/// Runs each group of trials in a lab of its own, so that one that goes down takes few with it;
/// trials that were chosen by name all in one.
fn in_labs(arguments: &Arguments, trials: &[Trial]) -> ExitCode {
    eprintln!("no KVM that runs Linux guests here (see cube-vmm doctor): running in the lab");
    if arguments.filter.is_some() || !arguments.skip.is_empty() {
        return in_lab(&[]);
    }
    let group =
        |trial: &Trial| trial.name().split_once("::").map(|(group, _)| format!("{group}::"));
    let mut groups: Vec<String> = trials.iter().filter_map(group).collect();
    groups.dedup();
    let mut failed = Vec::new();
    for group in groups {
        if in_lab(std::slice::from_ref(&group)) != ExitCode::SUCCESS {
            failed.push(group);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("failed: {}", failed.join(" "));
    ExitCode::FAILURE
}

/// Runs this again in the lab; a lab that goes down is replaced by a new one.
fn in_lab(filter: &[String]) -> ExitCode {
    let lab = repository().join("tests/lab/run");
    let exe = match env::current_exe() {
        Ok(exe) => exe,
        Err(error) => {
            eprintln!("the path of this program is unknown: {error}");
            return ExitCode::FAILURE;
        }
    };
    for attempt in 1..=LABS {
        let started = Instant::now();
        let mut command = Command::new(&lab);
        command.args(["--timeout", LAB_TIMEOUT, "--"]).arg(&exe);
        command.args(env::args_os().skip(1)).args(filter);
        match command.status() {
            Ok(status)
                if status.code() == Some(LAB_FAILED)
                    && attempt < LABS
                    && started.elapsed() < A_CRASH_COMES_WITHIN =>
            {
                eprintln!(
                    "the lab itself failed (attempt {attempt} of {LABS}): once more from the start"
                );
            }
            Ok(status) => {
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                return code.map_or(ExitCode::FAILURE, ExitCode::from);
            }
            Err(error) => {
                eprintln!("{} cannot be run: {error}", lab.display());
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::FAILURE
}
