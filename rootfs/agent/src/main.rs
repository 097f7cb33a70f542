//! `cube-agent`, PID 1 of a CubeVMM guest: it makes the guest a place to run commands in, and
//! runs them for the host, as told in `guest_protocol`.
//!
//! | file | purpose |
//! |---|---|
//! | `boot` | PID 1: mounts, modules, the root, then fork, and reap |
//! | `listen`, `ready` | the agent proper: accept connections; tell the host |
//! | `connection` | one connection: requests in, answers out |
//! | `process` | the processes that were spawned, until they are released |
//! | `spawn`, `program`, `child` | start one: prepare, fork, and what happens in between |
//! | `stream`, `terminal`, `watch` | move the bytes of an attached stream; terminals; poll |
//! | `network`, `netlink` | other addresses for a restored guest, and the kernel's part in it |
//! | `guest`, `power`, `stamp`, `log` | the guest's state; its end; boot stamps; the console |

mod boot;
mod child;
mod connection;
mod guest;
mod listen;
mod log;
mod netlink;
mod network;
mod power;
mod process;
mod program;
mod ready;
mod refusal;
mod spawn;
mod stamp;
mod stream;
mod terminal;
mod watch;

use std::path::Path;
use std::process::ExitCode;

const HELP: &str = "\
cube-agent: PID 1 of a CubeVMM guest

As PID 1 it boots the guest and serves the host over vsock. It takes its settings from the kernel
command line:
  cube.root=DEVICE        the root for commands, say /dev/vda; the initramfs if absent
  cube.rootfstype=TYPE    its file system; detected if absent
  cube.rootflags=OPTIONS  its mount options, say ro
  cube.hostname=NAME      the host name; /etc/hostname or 'cube' if absent

Otherwise:
  --serve-unix DIR        serve on the socket DIR/agent.sock, on any Linux host, for tests
  --version               print the version
  --help                  print this
";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        stamp::stamp(guest_protocol::boot_stamp::USERSPACE);
        boot::run()
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--help" | "-h"] => print!("{HELP}"),
        ["--version" | "-V"] => println!("cube-agent {}", env!("CARGO_PKG_VERSION")),
        ["--serve-unix", dir] => {
            if let Err(error) = listen::serve_unix(Path::new(dir)) {
                eprintln!("cube-agent: cannot serve in '{dir}': {error}");
                return ExitCode::FAILURE;
            }
        }
        _ => {
            eprintln!("cube-agent: not PID 1 and no such usage; see --help");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
