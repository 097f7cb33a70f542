//! `cube-vmm run`: a VM for one command.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;

use super::guest_command::GuestCommand;
use super::options::{SpawnOptions, VmOptions};
use crate::agent::{Guest, watch_for_hello};
use crate::builder::{self, Observers};
use crate::console::ConsoleSink;
use crate::control::{Control, Happening};
use crate::event::Events;
use crate::outcome::{EXIT_NOT_READY, EXIT_POWERED_OFF_EARLY, EXIT_SETUP, Outcome};
use crate::signals;
use crate::trace::{Ladder, step};

/// Console lines that are shown when a guest fails.
const CONSOLE_LINES: usize = 20;
/// How long a command may take to end after the signal that was passed on to it.
const SIGNAL_GRACE: Duration = Duration::from_secs(10);
/// How long a guest whose connections have broken may take to end.
const GOING_DOWN: Duration = Duration::from_secs(5);
/// How long a guest with writable disks may take to write them back.
const SYNC_GRACE: Duration = Duration::from_secs(10);

/// Options of `run`.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// The VM.
    #[command(flatten)]
    pub vm: VmOptions,

    /// Boot the kernel only: no agent, no command; ends when the guest does
    #[arg(long, conflicts_with_all = ["env", "workdir", "user", "argv"])]
    pub no_agent: bool,

    /// The command.
    #[command(flatten)]
    pub spawn: SpawnOptionsOrNone,
}

/// [`SpawnOptions`], which `--no-agent` does without.
#[derive(Args, Clone, Debug)]
pub struct SpawnOptionsOrNone {
    /// The options.
    #[command(flatten)]
    pub options: Option<SpawnOptions>,
}

/// Runs it. The exit code is the command's; see the long help for the others.
pub fn run(options: &RunOptions, ladder: Ladder) -> anyhow::Result<u8> {
    let spawn = match (&options.spawn.options, options.no_agent) {
        (Some(options), false) => Some(options.spawn()?),
        (_, true) => None,
        (None, false) => {
            anyhow::bail!("no command was given; write it after --, as in -- uname -r")
        }
    };
    let config = options.vm.config(!options.no_agent)?;
    if let Some(path) = &options.vm.trace {
        check_writable(path)?;
    }
    let (events, receiver) = Events::channel();
    let stamp_entry = options.vm.trace.is_some();
    let console = ConsoleSink::default();
    let observers = Observers { ladder, stamp_entry, events: events.clone(), console };
    let vm = builder::build(&config, &observers)?;
    signals::watch(events.clone())?;
    let mut control = Control::new(vm, events, receiver);
    if spawn.is_some() {
        watch_for_hello(control.vm().vsock(), observers.events.clone())?;
    }
    control.start()?;
    let syncs = config.all_disks().iter().any(|disk| !disk.read_only);
    let mut run = Run { control, observers, syncs, command: None, signalled: None };
    let code = match spawn {
        Some(spawn) => run.until_the_end(spawn, options.vm.boot_timeout()),
        None => run.without_agent(),
    };
    if let Some(path) = &options.vm.trace {
        write_trace(path, &run.observers.ladder)?;
    }
    Ok(code)
}

/// Stands for standard error, as a table.
const TABLE: &str = "-";

/// Finds out before the boot whether the ladder can be written after it.
pub fn check_writable(path: &Path) -> anyhow::Result<()> {
    use anyhow::Context;
    if path.as_os_str() == TABLE {
        return Ok(());
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.map(drop).with_context(|| format!("trace file {} cannot be written", path.display()))
}

/// Writes the ladder as JSON, or as a table to standard error.
pub fn write_trace(path: &Path, ladder: &Ladder) -> anyhow::Result<()> {
    use anyhow::Context;
    if path.as_os_str() == TABLE {
        eprint!("{}", ladder.report().render());
        return Ok(());
    }
    let mut text = serde_json::to_string_pretty(&ladder.report())?;
    text.push('\n');
    std::fs::write(path, text)
        .with_context(|| format!("trace file {} cannot be written", path.display()))
}

struct Run {
    control: Control,
    observers: Observers,
    syncs: bool,
    command: Option<GuestCommand>,
    /// The signal that ends the run, and until when the command may react to it.
    signalled: Option<(i32, Instant)>,
}

impl Run {
    fn without_agent(&mut self) -> u8 {
        loop {
            match self.control.next(None) {
                Happening::Ended(outcome) => {
                    self.tell_of_failure(&outcome);
                    return outcome.exit_code();
                }
                Happening::Signal(signal) if signal != Signal::SIGWINCH as i32 => {
                    self.control.kill();
                    return by_signal(signal);
                }
                _ => {}
            }
        }
    }

    fn until_the_end(&mut self, spawn: guest_protocol::Spawn, timeout: Duration) -> u8 {
        let boot_deadline = Instant::now() + timeout;
        let mut spawn = Some(spawn);
        loop {
            let deadline = match (&self.signalled, &spawn) {
                (Some((_, at)), _) => Some(*at),
                (None, Some(_)) => Some(boot_deadline),
                (None, None) => None,
            };
            match self.control.next(deadline) {
                Happening::Ready => {
                    self.observers.ladder.mark(step::AGENT_READY);
                    if let Some(spawn) = spawn.take()
                        && let Some(code) = self.start(spawn)
                    {
                        return code;
                    }
                }
                // Only restored guests.
                Happening::NotReady(_) => {}
                Happening::Finished => return self.finished(),
                Happening::Ended(outcome) => return self.ended_early(&outcome),
                Happening::Signal(signal) => {
                    if let Some(code) = self.signal(signal) {
                        return code;
                    }
                }
                Happening::TimedOut => return self.timed_out(timeout),
            }
        }
    }

    fn start(&mut self, spawn: guest_protocol::Spawn) -> Option<u8> {
        let guest = Guest(self.control.vm().vsock().clone());
        let ladder = self.observers.ladder.clone();
        let on_start = move || ladder.mark(step::COMMAND_STARTED);
        match GuestCommand::start(guest, spawn, self.observers.events.clone(), on_start) {
            Ok(command) => {
                self.command = Some(command);
                None
            }
            Err(error) => {
                self.control.kill();
                complain(&format!("the command cannot be attached: {error}"));
                Some(EXIT_SETUP)
            }
        }
    }

    fn finished(&mut self) -> u8 {
        if self.command.as_ref().is_some_and(GuestCommand::lost_the_guest)
            && let Some(outcome) = self.wait_for_the_end()
        {
            return self.ended_early(&outcome);
        }
        if self.syncs {
            self.control.power_off(SYNC_GRACE);
            while !matches!(self.control.next(None), Happening::Ended(_)) {}
        } else {
            self.control.kill();
        }
        // Restores the terminal before anything is written to it.
        let result = self.command.take().map(|command| command.exit_code());
        let (code, message) = result.unwrap_or((EXIT_SETUP, None));
        if let Some(message) = message {
            complain(&message);
        }
        match self.signalled {
            Some((signal, _)) if code == 0 => by_signal(signal),
            _ => code,
        }
    }

    /// A guest that goes down takes its connections down first.
    fn wait_for_the_end(&mut self) -> Option<Outcome> {
        let deadline = Instant::now() + GOING_DOWN;
        loop {
            match self.control.next(Some(deadline)) {
                Happening::Ended(outcome) => return Some(outcome),
                Happening::TimedOut => return None,
                _ => {}
            }
        }
    }

    fn ended_early(&mut self, outcome: &Outcome) -> u8 {
        self.command = None;
        match outcome {
            Outcome::PowerOff | Outcome::Stopped => {
                self.fail("the guest powered off before the command had ended");
                EXIT_POWERED_OFF_EARLY
            }
            other => {
                self.tell_of_failure(other);
                other.exit_code()
            }
        }
    }

    /// The first signal goes to the command, a second one to the VM.
    fn signal(&mut self, signal: i32) -> Option<u8> {
        if signal == Signal::SIGWINCH as i32 {
            if let Some(command) = &self.command {
                command.resize();
            }
            return None;
        }
        let passed_on = self.command.as_ref().is_some_and(|command| command.signal(signal));
        if passed_on && self.signalled.is_none() {
            self.signalled = Some((signal, Instant::now() + SIGNAL_GRACE));
            return None;
        }
        self.command = None;
        self.control.kill();
        Some(by_signal(signal))
    }

    fn timed_out(&mut self, timeout: Duration) -> u8 {
        self.command = None;
        let stands = self.control.vm().positions();
        self.control.kill();
        if let Some((signal, _)) = self.signalled {
            return by_signal(signal);
        }
        self.fail(&format!(
            "the guest's agent did not answer within {} s; raise --boot-timeout, or look at the \
             whole console with --console serial; {stands}",
            timeout.as_secs()
        ));
        EXIT_NOT_READY
    }

    fn tell_of_failure(&self, outcome: &Outcome) {
        if !matches!(outcome, Outcome::PowerOff | Outcome::Stopped) {
            self.fail(&outcome.to_string());
        }
    }

    fn fail(&self, message: &str) {
        let lines = self.control.vm().console().tail(CONSOLE_LINES);
        if lines.is_empty() {
            complain(&format!("{message}; the guest's console is empty"));
            return;
        }
        complain(&format!("{message}; its console ended with:"));
        for line in lines {
            eprintln!("  | {line}");
        }
    }
}

fn complain(message: &str) {
    eprintln!("cube-vmm: {message}");
}

fn by_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}
