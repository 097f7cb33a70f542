//! The way from this process to the agent in the guest, and the agent's hello.

use std::io;
use std::time::Duration;

use devices::virtio::vsock::{VsockHandle, VsockListener};
use guest_protocol::{Connect, READY_PORT, frame};

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
