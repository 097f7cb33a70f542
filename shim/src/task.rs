//! The Task service: one short method for each call of containerd's, and the events that follow.
//!
//! Versions 2 and 3 are one service under two names.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
    ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
    StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::events::task::{
    TaskCheckpointed, TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskIO, TaskStart,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::shim_async::{Task, create_task};
use containerd_shim_protos::ttrpc::Result as Answer;
use containerd_shim_protos::ttrpc::asynchronous::{Service, TtrpcContext};
use guest_protocol::WindowSize;

use crate::actions::{ACTION, Action};
use crate::checkpoint::ends_with_it;
use crate::clock::timestamp;
use crate::error::Error;
use crate::lifecycle::New;
use crate::sandbox::Sandbox;
use crate::stats;
use crate::stdio::Stdio;
use crate::whole::whole;

const V2: &str = "containerd.task.v2.Task";
const V3: &str = "containerd.task.v3.Task";

/// The service of a sandbox, under both names.
pub fn services(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    let service = || create_task(Arc::new(TaskService { sandbox: sandbox.clone() }));
    let (mut all, mut older) = (service(), service());
    if let Some(service) = older.remove(V3) {
        all.insert(V2.to_owned(), service);
    }
    all.into_iter().map(|(name, service)| (name, whole(service))).collect()
}

struct TaskService {
    sandbox: Arc<Sandbox>,
}

type Context = TtrpcContext;

#[async_trait]
impl Task for TaskService {
    async fn state(&self, _: &Context, request: StateRequest) -> Answer<StateResponse> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let end = process.end();
        Ok(StateResponse {
            id: container.id.clone(),
            bundle: container.bundle.display().to_string(),
            pid: process.pid(),
            status: container.status(&process).into(),
            stdin: process.stdio.stdin.clone(),
            stdout: process.stdio.stdout.clone(),
            stderr: process.stdio.stderr.clone(),
            terminal: process.stdio.terminal,
            exit_status: end.map_or(0, |end| end.status),
            exited_at: end.map(|end| timestamp(end.at)).into(),
            exec_id: request.exec_id,
            ..Default::default()
        })
    }

    async fn create(&self, _: &Context, request: CreateTaskRequest) -> Answer<CreateTaskResponse> {
        let stdio = Stdio {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let new = New {
            id: request.id.clone(),
            bundle: request.bundle.clone().into(),
            rootfs: request.rootfs.clone(),
            stdio: stdio.clone(),
            checkpoint: request.checkpoint.clone(),
        };
        let container = self.sandbox.create(new).await.inspect_err(|error| {
            tracing::error!(%error, id = request.id, "task not created");
        })?;
        let pid = container.init.pid();
        self.sandbox.events.publish(&TaskCreate {
            container_id: request.id,
            bundle: request.bundle,
            rootfs: request.rootfs,
            io: MessageField::some(TaskIO {
                stdin: stdio.stdin,
                stdout: stdio.stdout,
                stderr: stdio.stderr,
                terminal: stdio.terminal,
                ..Default::default()
            }),
            pid,
            ..Default::default()
        });
        Ok(CreateTaskResponse { pid, ..Default::default() })
    }

    async fn start(&self, _: &Context, request: StartRequest) -> Answer<StartResponse> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        self.sandbox.start(&container, &process).await?;
        let (container_id, pid) = (container.id.clone(), process.pid());
        if request.exec_id.is_empty() {
            self.sandbox.events.publish(&TaskStart { container_id, pid, ..Default::default() });
        } else {
            self.sandbox.events.publish(&TaskExecStarted {
                container_id,
                exec_id: request.exec_id,
                pid,
                ..Default::default()
            });
            // Only now, so that its end is told after its start.
            self.sandbox.watch(&container, &process);
        }
        Ok(StartResponse { pid, ..Default::default() })
    }

    async fn delete(&self, _: &Context, request: DeleteRequest) -> Answer<DeleteResponse> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let end = if request.exec_id.is_empty() {
            self.sandbox.delete(&container).await?
        } else {
            self.sandbox.delete_exec(&container, &process).await?
        };
        let pid = process.pid();
        if request.exec_id.is_empty() {
            self.sandbox.events.publish(&TaskDelete {
                container_id: request.id,
                pid,
                exit_status: end.status,
                exited_at: MessageField::some(timestamp(end.at)),
                ..Default::default()
            });
        }
        Ok(DeleteResponse {
            pid,
            exit_status: end.status,
            exited_at: MessageField::some(timestamp(end.at)),
            ..Default::default()
        })
    }

    async fn pids(&self, _: &Context, request: PidsRequest) -> Answer<PidsResponse> {
        let container = self.sandbox.container(&request.id)?;
        // Never empty for a container that is there, and without asking a guest that may be paused:
        // containerd takes an empty answer for a shim that was forgotten.
        let info = ProcessInfo { pid: container.init.pid().max(1), ..Default::default() };
        Ok(PidsResponse { processes: vec![info], ..Default::default() })
    }

    async fn pause(&self, _: &Context, request: PauseRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        self.sandbox.pause(&container).await.inspect_err(|error| {
            tracing::error!(%error, id = request.id, "task not paused");
        })?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &Context, request: ResumeRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        self.sandbox.resume(&container).await?;
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _: &Context, request: CheckpointTaskRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        self.sandbox.checkpoint(request.path.clone().into()).await.inspect_err(|error| {
            tracing::error!(%error, id = request.id, "no checkpoint is written");
        })?;
        let checkpoint = request.path.clone();
        let container_id = container.id.clone();
        self.sandbox.events.publish(&TaskCheckpointed {
            container_id,
            checkpoint,
            ..Default::default()
        });
        if ends_with_it(&request) {
            let kill = libc::SIGKILL.unsigned_abs();
            self.sandbox.kill(&container, &container.init, kill, true).await?;
        }
        Ok(Empty::new())
    }

    async fn kill(&self, _: &Context, request: KillRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        self.sandbox.kill(&container, &process, request.signal, request.all).await?;
        Ok(Empty::new())
    }

    async fn exec(&self, _: &Context, request: ExecProcessRequest) -> Answer<Empty> {
        let stdio = Stdio {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let spec = request.spec.into_option().unwrap_or_default().value;
        self.sandbox.exec(&request.id, &request.exec_id, stdio, &spec).await?;
        self.sandbox.events.publish(&TaskExecAdded {
            container_id: request.id,
            exec_id: request.exec_id,
            ..Default::default()
        });
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &Context, request: ResizePtyRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let short = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        let size = WindowSize { rows: short(request.height), cols: short(request.width) };
        // A guest that stands still gets the size when it is told the next time.
        let vm = self.sandbox.vm().ok().filter(|_| !container.is_paused());
        process.resize(vm.as_ref().map(|vm| &vm.guest), size).await?;
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &Context, request: CloseIORequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        if request.stdin {
            process.close_input();
        }
        Ok(Empty::new())
    }

    async fn update(&self, _: &Context, request: UpdateTaskRequest) -> Answer<Empty> {
        let container = self.sandbox.container(&request.id)?;
        let resources = request.resources.into_option().unwrap_or_default().value;
        let action = Action::of(&request.annotations, &self.sandbox.config)?;
        match action {
            None => self.sandbox.update(&container, &resources).await?,
            Some(_) if !resources.is_empty() => {
                return Err(Error::Invalid(format!(
                    "an update of task {} has limits and the annotation {ACTION}; ask for one at a \
                     time",
                    container.id
                ))
                .into());
            }
            Some(Action::PauseToSnapshot(folder)) => {
                self.sandbox.pause_to_snapshot(&container, folder).await?;
            }
        }
        Ok(Empty::new())
    }

    async fn wait(&self, _: &Context, request: WaitRequest) -> Answer<WaitResponse> {
        let container = self.sandbox.container(&request.id)?;
        let end = container.process(&request.exec_id)?.wait().await;
        Ok(WaitResponse {
            exit_status: end.status,
            exited_at: MessageField::some(timestamp(end.at)),
            ..Default::default()
        })
    }

    async fn stats(&self, _: &Context, request: StatsRequest) -> Answer<StatsResponse> {
        let container = self.sandbox.container(&request.id)?;
        let stats = stats::of(&self.sandbox, &container).await?;
        Ok(StatsResponse { stats: MessageField::some(stats), ..Default::default() })
    }

    async fn connect(&self, _: &Context, request: ConnectRequest) -> Answer<ConnectResponse> {
        // No error for a name that is not known: containerd asks this to see whether we live.
        let container = self.sandbox.container(&request.id).ok();
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: container.map_or(0, |container| container.init.pid()),
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &Context, request: ShutdownRequest) -> Answer<Empty> {
        // Asked after the removal of each container: only the last one's ends the sandbox.
        if request.now || self.sandbox.all().is_empty() {
            self.sandbox.end().await;
        }
        Ok(Empty::new())
    }
}
