//! One connection from the host, served by a thread of its own: requests are read and answered one
//! after the other, until the host closes it or it becomes a stream.

use crate::listen::Agent;
use crate::process::Process;
use crate::refusal::Refusal;
use crate::watch::{self, GONE, READABLE};
use crate::{guest, power, spawn, stamp, stream};
use guest_protocol::{
    FrameError, MAX_FRAME, PowerOff, ProcessId, Request, Response, Stream, boot_stamp, frame,
};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the answer to a power-off may take to reach the host.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Serves `connection` to its end.
pub fn serve(agent: &Agent, connection: UnixStream) {
    let mut session = Session { agent, connection, bound: Vec::new() };
    let stream = session.run();
    let Session { connection, bound, .. } = session;
    match stream {
        Some((process, stream)) => attach(&process, stream, connection),
        None => drop(connection),
    }
    for process in bound {
        agent.processes.kill(process);
    }
}

/// A control connection.
struct Session<'a> {
    agent: &'a Agent,
    connection: UnixStream,
    /// The processes that end with it.
    bound: Vec<ProcessId>,
}

impl Session<'_> {
    /// Answers requests until the host is gone, or wants a stream instead.
    fn run(&mut self) -> Option<(Arc<Process>, Stream)> {
        let mut first = true;
        loop {
            let answer = match frame::read(&mut self.connection, MAX_FRAME) {
                Ok(Request::Attach { process, stream }) if first => {
                    match self.agent.processes.get(process) {
                        Ok(process) => return Some((process, stream)),
                        Err(refusal) => refusal.into(),
                    }
                }
                Ok(Request::PowerOff { how }) => self.power_off(how)?,
                Ok(request) => self.answer(request)?,
                Err(FrameError::Closed | FrameError::Io(_) | FrameError::Timeout) => return None,
                Err(error) => {
                    // What follows cannot be told from the rest of this one.
                    self.refuse(&error);
                    return None;
                }
            };
            frame::write(&mut self.connection, &answer).ok()?;
            first = false;
        }
    }

    fn refuse(&mut self, error: &FrameError) {
        let reason = match error {
            FrameError::Malformed(cause) => cause.to_string(),
            other => other.to_string(),
        };
        let refusal = Refusal::Malformed(reason);
        let _ = frame::write(&mut self.connection, &Response::from(refusal));
    }

    /// `None` if the host is gone.
    fn answer(&mut self, request: Request) -> Option<Response> {
        let done = self.perform(request).transpose()?;
        Some(done.unwrap_or_else(Response::from))
    }

    fn perform(&mut self, request: Request) -> Result<Option<Response>, Refusal> {
        let agent = self.agent;
        let processes = &agent.processes;
        match request {
            Request::Ping => {}
            Request::Info => {
                let info = guest::info(&agent.hello, processes.count());
                return Ok(Some(Response::Info(info)));
            }
            Request::Spawn(spawn) => {
                let spawned = spawn::spawn(processes, &spawn)?;
                if spawn.kill_on_disconnect {
                    self.bound.push(spawned.process);
                }
                if agent.guest && !agent.started.swap(true, Ordering::Relaxed) {
                    stamp::stamp(boot_stamp::COMMAND_STARTED);
                }
                return Ok(Some(Response::Spawned(spawned)));
            }
            Request::Signal { process, signal, group } => {
                let sent = processes.get(process)?.signal(signal, group);
                sent.map_err(Refusal::system("send the signal"))?;
            }
            Request::Detach { process, stream } => processes.get(process)?.detach(stream)?,
            Request::Resize { process, size } => processes.get(process)?.resize(size)?,
            Request::Wait { process } => return self.wait(&*processes.get(process)?),
            Request::Release { process } => {
                processes.release(process)?;
                self.bound.retain(|bound| *bound != process);
            }
            Request::Renew(renew) if agent.guest => {
                // The boot that stamps tell of is over. And QEMU's emulated processor lets no process
                // use a port any more once its state has been set from outside: it then takes the task
                // segment, which is busy as ever, for none.
                agent.started.store(true, Ordering::Relaxed);
                guest::renew(&renew)?;
            }
            Request::Configure(configure) if agent.guest => guest::configure(&configure)?,
            Request::Renew(_) | Request::Configure(_) | Request::PowerOff { .. } => {
                return Err(Refusal::Invalid("this agent does not run in a guest of its own"));
            }
            Request::Attach { .. } => {
                return Err(Refusal::Invalid("attach is not the first request of its connection"));
            }
            Request::Unknown => return Err(Refusal::UnknownRequest),
        }
        Ok(Some(Response::Done))
    }

    /// Waits for the end of the process; `None` if the host goes away meanwhile.
    fn wait(&self, process: &Process) -> Result<Option<Response>, Refusal> {
        loop {
            if let Some(status) = process.ended() {
                return Ok(Some(Response::Exited { status }));
            }
            let watched =
                [(Some(process.pidfd.as_fd()), READABLE), (Some(self.connection.as_fd()), GONE)];
            let [_, connection] = watch::wait(watched, None).map_err(Refusal::system("wait"))?;
            if connection != 0 {
                return Ok(None);
            }
        }
    }

    /// Answers before the end, since nothing can be answered after it.
    fn power_off(&mut self, how: PowerOff) -> Option<Response> {
        if !self.agent.guest {
            return self.answer(Request::PowerOff { how });
        }
        power::settle();
        frame::write(&mut self.connection, &Response::Done).ok()?;
        let _ = watch::wait([(Some(self.connection.as_fd()), GONE)], Some(LAST_WORDS));
        self.agent.log.info("the host wants this guest to end");
        power::off(how)
    }
}

/// Turns `connection` into a stream of `process`.
fn attach(process: &Process, stream: Stream, mut connection: UnixStream) {
    match process.take(stream) {
        Err(refusal) => {
            let _ = frame::write(&mut connection, &Response::from(refusal));
        }
        Ok(taken) => match frame::write(&mut connection, &Response::Done) {
            Ok(()) => stream::run(process, stream, taken, connection),
            Err(_) => process.give_back(stream, Some(taken.end)),
        },
    }
}
