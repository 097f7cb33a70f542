//! The way from this process to the agent in the guest, and the agent's hello.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use devices::virtio::rng::host_entropy;
use devices::virtio::vsock::{VsockHandle, VsockListener};
use guest_protocol::{Client, Connect, Hello, READY_PORT, Renew, frame};

use crate::event::{Event, Events};

/// How long a guest that has connected may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// The guest, over the VM's own vsock device, without a socket file.
#[derive(Clone)]
pub struct Guest(pub VsockHandle);

impl Connect for Guest {
    fn connect(&self, port: u32) -> io::Result<std::os::unix::net::UnixStream> {
        self.0.connect(port)
    }
}

/// Waits on a thread for the agent's hello and sends it to the control thread, as often as a guest
/// says it.
pub fn watch_for_hello(vsock: &VsockHandle, events: Events) -> io::Result<()> {
    let listener = vsock.listen(READY_PORT)?;
    std::thread::Builder::new()
        .name("hello".to_owned())
        .stack_size(128 * 1024)
        .spawn(move || watch(&listener, &events))?;
    Ok(())
}

/// Attempts to reach the agent of a restored guest, and the pause between them.
const ATTEMPTS: u32 = 600;
const BETWEEN: Duration = Duration::from_millis(100);

/// Makes a restored guest one of its own, on a thread: gives it fresh randomness and the time of
/// day. Then it is ready, as it was when it said `hello`.
pub fn renew(vsock: &VsockHandle, hello: Hello, events: Events) {
    let guest = Guest(vsock.clone());
    let ask = move || {
        for _ in 0..ATTEMPTS {
            match ask_to_renew(guest.clone()) {
                Ok(()) => {
                    events.send(Event::Ready(hello));
                    return;
                }
                Err(error) => tracing::debug!(%error, "the restored guest is not ready"),
            }
            if events.outcome().is_some() {
                return;
            }
            std::thread::sleep(BETWEEN);
        }
        tracing::warn!("the agent of the restored guest does not answer");
    };
    let thread = std::thread::Builder::new().name("renew".to_owned()).stack_size(128 * 1024);
    if let Err(error) = thread.spawn(ask) {
        tracing::warn!(%error, "the restored guest is not told that it is one");
    }
}

fn ask_to_renew(guest: Guest) -> Result<(), guest_protocol::Error> {
    let mut client = Client::connect(guest)?;
    let mut entropy = vec![0; 64];
    if let Err(error) = host_entropy(&mut entropy) {
        tracing::warn!(%error, "no randomness for the restored guest");
        entropy.clear();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    let unix_nanos = now.and_then(|now| u64::try_from(now.as_nanos()).ok());
    client.renew(Renew { unix_nanos, entropy, hostname: None })
}

fn watch(listener: &VsockListener, events: &Events) {
    loop {
        match listener.accept_timeout(Duration::from_secs(3600)) {
            Ok(stream) => match frame::read_hello(&stream, HELLO_TIMEOUT) {
                Ok(hello) => {
                    if !events.send(Event::Ready(hello)) {
                        return;
                    }
                }
                Err(error) => tracing::warn!(%error, "a guest connection that is no hello"),
            },
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
            // The device is gone, and so is the VM.
            Err(_) => return,
        }
    }
}
