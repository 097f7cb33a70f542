//! What a command gets, and how it ends.

use crate::harness::{Agent, eventually, is_root, sh};
use guest_protocol::{ExitStatus, Spawn, Stdio};
use std::thread;

#[test]
fn exit_codes_and_signals_are_told_apart() {
    let agent = Agent::start();
    assert_eq!(agent.shell("exit 0").status, ExitStatus::Code(0));
    assert_eq!(agent.shell("exit 200").status, ExitStatus::Code(200));
    let killed = agent.shell("kill -9 $$").status;
    assert_eq!((killed, killed.to_exit_code()), (ExitStatus::Signal(9), 137));
    let real_time = agent.shell("kill -40 $$").status;
    assert_eq!((real_time, real_time.to_exit_code()), (ExitStatus::Signal(40), 168));
}

#[test]
fn a_missing_program_is_127_and_named() {
    let agent = Agent::start();
    for program in ["no-such-program", "/no/such/program"] {
        let error = agent.start_session(Spawn::new([program]), None).err().unwrap();
        assert_eq!(error.exit_code(), 127, "{error}");
        assert!(error.to_string().contains(program), "{error}");
    }
}

#[test]
fn a_program_that_cannot_be_executed_is_126_and_named() {
    let agent = Agent::start();
    for program in ["/etc/passwd", "/etc"] {
        let error = agent.start_session(Spawn::new([program]), None).err().unwrap();
        assert_eq!(error.exit_code(), 126, "{error}");
        assert!(error.to_string().contains(program), "{error}");
    }
}

#[test]
fn the_path_of_the_request_is_searched() {
    let agent = Agent::start();
    let error = agent.start_session(Spawn::new(["ls"]).env("PATH", "/nowhere"), None);
    assert_eq!(error.err().unwrap().exit_code(), 127);
    assert!(agent.run(Spawn::new(["true"]).env("PATH", "/nowhere:/bin")).status.success());
}

#[test]
fn the_environment_is_the_requests_and_nothing_else() {
    let agent = Agent::start();
    let spawn = Spawn { clear_env: true, ..Spawn::new(["/usr/bin/env"]).env("A", "b c") };
    assert_eq!(agent.run(spawn).text(), "A=b c\n");
    let defaults = agent.run(Spawn::new(["env"]));
    let names: Vec<&str> = defaults.text().lines().filter_map(|l| l.split('=').next()).collect();
    assert_eq!(names, ["PATH", "HOME"]);
}

#[test]
fn the_working_directory_is_set_and_must_exist() {
    let agent = Agent::start();
    assert_eq!(agent.run(Spawn::new(["/bin/pwd"])).text(), "/\n");
    assert_eq!(agent.run(Spawn::new(["/bin/pwd"]).cwd("/usr")).text(), "/usr\n");
    let error = agent.start_session(Spawn::new(["/bin/pwd"]).cwd("/nowhere"), None);
    let error = error.err().unwrap();
    assert_eq!(error.exit_code(), 127);
    assert!(error.to_string().contains("/nowhere"), "{error}");
}

#[test]
fn the_user_and_its_groups_are_set() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let spawn = Spawn { groups: vec![7, 8], ..sh("id -u; id -g; id -G; echo x >/dev/stdout") };
    let outcome = agent.run(spawn.user(65534, 65533));
    assert_eq!(outcome.text(), "65534\n65533\n65533 7 8\nx\n");
    let as_root = agent.shell("id -u; id -g; id -G");
    assert_eq!(as_root.text(), "0\n0\n0\n");
}

#[test]
fn signals_are_reset_and_only_the_standard_streams_are_inherited() {
    let agent = Agent::start();
    let outcome = agent.shell("grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd");
    // The fourth is ls's own.
    let expected = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n0\n1\n2\n3\n";
    assert_eq!(outcome.text(), expected);
}

#[test]
fn each_command_has_a_session_of_its_own() {
    let agent = Agent::start();
    let outcome = agent.shell("echo $$; cut -d' ' -f5,6 /proc/$$/stat");
    let lines: Vec<&str> = outcome.text().lines().collect();
    assert_eq!(lines[1], format!("{0} {0}", lines[0]));
}

#[test]
fn signals_reach_the_command_or_its_group() {
    let agent = Agent::start();
    let line = "trap 'echo term; exit 3' TERM; echo ready; while :; do sleep 0.01; done";
    let running = agent.start_session(sh(line), None).unwrap();
    running.wait_for("ready");
    running.remote().signal(15).unwrap();
    let outcome = running.finish();
    assert_eq!((outcome.status, outcome.text()), (ExitStatus::Code(3), "ready\nterm\n"));

    // A shell that waits for its child keeps the signal for itself until the child has gone.
    let line = "sh -c 'echo ready; exec sleep 1000'; echo over";
    let running = agent.start_session(sh(line), None).unwrap();
    running.wait_for("ready");
    running.remote().signal_group(2).unwrap();
    assert_eq!(running.finish().status, ExitStatus::Signal(2));
}

#[test]
fn many_commands_run_at_once() {
    let agent = Agent::start();
    thread::scope(|scope| {
        for number in 0..20 {
            let agent = &agent;
            scope.spawn(move || {
                let outcome = agent.run_with(sh(&format!("cat; exit {number}")), vec![number; 99]);
                assert_eq!(outcome.status, ExitStatus::Code(number));
                assert_eq!(outcome.stdout, vec![number; 99]);
            });
        }
    });
    assert_eq!(agent.client().info().unwrap().processes, 0);
}

#[test]
fn a_session_without_streams_still_ends() {
    let agent = Agent::start();
    let spawn = sh("read x; echo lost; exit 4");
    let session = guest_protocol::Session::start(agent.socket(), spawn, Stdio::null()).unwrap();
    assert_eq!(session.wait().unwrap(), ExitStatus::Code(4));
    eventually("all is forgotten", || agent.client().info().unwrap().processes == 0);
}
