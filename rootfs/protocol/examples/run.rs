//! Runs a command in a guest: `run SOCKET [-t] PROGRAM [ARGUMENT]...`, SOCKET being the VMM's
//! unix socket for vsock. With `--power-off` for PROGRAM, ends the guest.

use guest_protocol::{Client, Error, HybridSocket, PowerOff, Session, Spawn, Stdio, WindowSize};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if args.len() < 2 {
        eprintln!("usage: run SOCKET [-t] PROGRAM [ARGUMENT]... | run SOCKET --power-off");
        return ExitCode::from(2);
    }
    let guest = HybridSocket::new(args.remove(0));
    match run(guest, args) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("run: {error}");
            error.exit_code().into()
        }
    }
}

fn run(guest: HybridSocket, mut args: Vec<String>) -> Result<u8, Error> {
    if args[0] == "--power-off" {
        return Client::connect(guest)?.power_off(PowerOff::Poweroff).map(|()| 0);
    }
    let tty = args[0] == "-t";
    let mut spawn = Spawn::new(args.drain(usize::from(tty)..)).kill_on_disconnect(true);
    spawn.tty = tty.then_some(WindowSize { rows: 24, cols: 80 });
    let stdio = Stdio::inherit().unwrap_or_default();
    Ok(Session::start(guest, spawn, stdio)?.wait()?.to_exit_code())
}
