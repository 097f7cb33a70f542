//! `cube-vmm`: the command line of the hypervisor.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hypervisor::api::Request;
use hypervisor::command::{client, restore, run, snapshot, start};
use hypervisor::outcome::EXIT_SETUP;
use hypervisor::trace::Ladder;
use hypervisor::{doctor, logs, signals};

/// Runs commands and services in microVMs on KVM.
#[derive(Parser)]
#[command(name = "cube-vmm", version, about, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  cube-vmm doctor                                   what can this machine run?
  cube-vmm run -- uname -r                          one command in a fresh guest
  cube-vmm run --cpus 4 --memory 4G -- sh           a shell in a larger one
  cube-vmm run --rootfs debian.ext4 -- apt list     with an image as its root
  cube-vmm start --api-socket /tmp/vm.sock &        a guest that stays
  cube-vmm exec --api-socket /tmp/vm.sock -- ps     a command in it
  cube-vmm stop --api-socket /tmp/vm.sock           and its end";

const EXIT_CODES: &str = "\
Exit code: that of the command in the guest, 128 + n if signal n killed it.
  126  the command cannot be executed      127  the command was not found
  110  the guest powered off early         111  the guest reset itself
  112  its kernel panicked                 113  triple fault
  114  KVM internal error                  115  the processor refused the guest's state
  116  a vCPU failed                       117  the agent did not answer in time
  118  restored memory cannot be brought in
  125  set-up failed: bad value, missing file, no KVM";

#[derive(Subcommand)]
enum Command {
    /// Boot a guest, run one command in it, exit with its code
    #[command(after_help = EXIT_CODES)]
    Run(run::RunOptions),
    /// Boot a guest that stays, controlled through a socket
    #[command(after_help = EXIT_CODES)]
    Start(start::StartOptions),
    /// Run a command in a guest that `start` holds
    Exec(client::ExecOptions),
    /// Tell about a VM that `start` holds, as JSON
    Info(client::Target),
    /// Tell what a VM and its devices have counted, for Prometheus or as JSON
    #[command(after_help = client::METRICS_HELP)]
    Metrics(client::MetricsOptions),
    /// Ask about the directories that a VM shares
    #[command(subcommand)]
    Fs(client::FsCommand),
    /// Let a VM stand still
    Pause(client::Target),
    /// Let a paused VM go on
    Resume(client::Target),
    /// Write a VM into a folder, and look after such folders
    #[command(after_help = snapshot::HELP)]
    Snapshot(snapshot::SnapshotOptions),
    /// Make a VM of such a folder, controlled through a socket
    #[command(after_help = restore::RESTORE_HELP)]
    Restore(restore::RestoreOptions),
    /// Ask a guest for memory through its balloon
    Balloon(client::BalloonOptions),
    /// Plug a disk or a network card into a VM with PCI
    #[command(after_help = client::PLUG_HELP)]
    Plug(client::PlugOptions),
    /// Take a device out of a VM with PCI
    Unplug(client::UnplugOptions),
    /// End a VM that `start` holds
    Stop(client::StopOptions),
    /// Find out what this machine can run, by running it
    #[command(after_help = "Exit code: 0 if Linux guests run here, 3 if only in the lab.")]
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let ladder = Ladder::start();
    let cli = Cli::parse();
    match logs::start().and_then(|()| act(&cli.command, ladder)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cube-vmm: {}", one_line(&error));
            ExitCode::from(EXIT_SETUP)
        }
    }
}

fn act(command: &Command, ladder: Ladder) -> anyhow::Result<u8> {
    signals::block()?;
    match command {
        Command::Run(options) => run::run(options, ladder),
        Command::Start(options) => start::start(options, ladder),
        Command::Exec(options) => client::exec(options),
        Command::Info(target) => client::info(target),
        Command::Metrics(options) => client::metrics(options),
        Command::Fs(command) => client::fs(command),
        Command::Pause(target) => client::plain(target, &Request::Pause {}),
        Command::Resume(target) => client::plain(target, &Request::Resume {}),
        Command::Snapshot(options) => snapshot::snapshot(options),
        Command::Restore(options) => restore::restore(options, ladder),
        Command::Balloon(options) => client::balloon(options),
        Command::Plug(options) => client::plug(options),
        Command::Unplug(options) => client::unplug(options),
        Command::Stop(options) => client::stop(options),
        Command::Doctor { json } => {
            let report = doctor::examine();
            let text =
                if *json { serde_json::to_string_pretty(&report)? + "\n" } else { report.render() };
            // Whoever closed the pipe has read enough.
            let _ = std::io::stdout().write_all(text.as_bytes());
            Ok(report.exit_code())
        }
    }
}

fn one_line(error: &anyhow::Error) -> String {
    let text = hypervisor::command::guest_command::with_causes(error.as_ref()).replace('\n', " ");
    // What was given may be anything; a terminal must not obey it.
    let plain = |letter: char| match letter.is_control() {
        true => letter.escape_default().to_string(),
        false => letter.to_string(),
    };
    text.chars().map(plain).collect()
}
