//! Programs in containers behave as those of any container engine.

use crate::bundle::{Guest, code, ended, process, spec};
use guest_protocol::WindowSize;
use libtest_mimic::Trial;
use serde_json::json;
use std::io::Write;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_container_is_what_its_spec_says,
        a_container_on_a_terminal_has_one_of_its_size,
        processes_are_added_to_a_container,
        what_cannot_be_run_is_told_before_it_is_started,
    ]
}

fn a_container_is_what_its_spec_says() {
    let guest = Guest::boot();
    let mut streams = guest.start("streams", &spec("echo out; echo err >&2; cat; exit 7"));
    streams.feed(b"in\n");
    let streams = streams.end();
    let output = (streams.status, streams.stdout.as_slice(), streams.stderr.as_slice());
    assert_eq!(output, (ended(7), b"out\nin\n".as_slice(), b"err\n".as_slice()));
    let state = guest.ask(&["state", "streams"]);
    assert_eq!((&state["status"], &state["exit_status"]), (&json!("stopped"), &json!(7)));
    assert!(state["warnings"][0].as_str().unwrap().contains("AppArmor"), "{state}");

    let mut identity = spec("hostname; pwd; id; ulimit -n; echo $COLOR; echo $$; umask");
    identity["process"]["cwd"] = json!("/var/lib/made/for/it");
    identity["process"]["user"] =
        json!({ "uid": 12, "gid": 34, "additionalGids": [56, 78], "umask": 0o27 });
    identity["process"]["rlimits"] =
        json!([{ "type": "RLIMIT_NOFILE", "soft": 333, "hard": 1_073_741_816_u64 }]);
    let said = guest.run_container("identity", &identity).text();
    let id = "uid=12 gid=34 groups=56,78";
    assert_eq!(said, format!("box\n/var/lib/made/for/it\n{id}\n333\ndeep blue\n1\n0027"));

    // A pipe that nobody reads ends a program as anywhere, and a stream can be opened anew.
    let mut pipe = spec("yes | head -n 1; echo again >/dev/stdout");
    pipe["process"]["user"] = json!({ "uid": 12, "gid": 34 });
    assert_eq!(guest.run_container("pipe", &pipe).text(), "y\nagain");
    let killed = guest.run_container("killed", &spec("exec sh -c 'kill -9 $$; exit 8'"));
    assert_eq!(code(&killed), 8, "the first of a pid namespace cannot kill itself: {killed:?}");
}

fn a_container_on_a_terminal_has_one_of_its_size() {
    let guest = Guest::boot();
    let line = "stty size; tty; trap 'stty size; exit 3' WINCH; echo ready; \
        while :; do sleep 0.1; done";
    let mut spec = spec(line);
    spec["process"]["terminal"] = json!(true);
    let keeper = guest.start("terminal", &spec);
    keeper.stdout.wait_for("ready");
    let mut added = process("stty size; read word; echo got $word; exit 5");
    added["terminal"] = json!(true);
    let mut added = guest.exec("terminal", "added", &added);
    added.stdout.wait_for("31 97\r\n");
    added.stdin.as_mut().unwrap().write_all(b"hello\r").unwrap();
    added.stdout.wait_for("got hello\r\n");
    assert_eq!(added.end().status, ended(5));
    keeper.remote().resize(WindowSize { rows: 7, cols: 8 }).unwrap();
    let output = keeper.end();
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(screen, "31 97\r\n/dev/pts/0\r\nready\r\n7 8\r\n");
    assert_eq!(output.status, ended(3));
}

fn processes_are_added_to_a_container() {
    let guest = Guest::boot();
    let main = guest.start("main", &spec("echo up; sleep 100000"));
    main.stdout.wait_for("up");
    let mut added = process("echo out; echo err >&2; cat; id; hostname; exit 5");
    added["user"] = json!({ "uid": 5, "gid": 6, "additionalGids": [7] });
    let mut keeper = guest.exec("main", "first", &added);
    keeper.feed(b"in\n");
    let output = keeper.end();
    assert_eq!(output.stdout, b"out\nin\nuid=5 gid=6 groups=7\nbox\n", "{output:?}");
    assert_eq!((output.status, output.stderr.as_slice()), (ended(5), b"err\n".as_slice()));
    let state = guest.ask(&["state", "--exec", "first", "main"]);
    assert_eq!((&state["status"], &state["exit_status"]), (&json!("stopped"), &json!(5)));

    let missing = guest.exec("main", "missing", &json!({ "args": ["nosuch"], "cwd": "/" })).end();
    assert_eq!((code(&missing), missing.stdout.len()), (127, 0), "{missing:?}");
    let error = &guest.ask(&["state", "--exec", "missing", "main"])["error"];
    let message = "exec: \"nosuch\": executable file not found in $PATH";
    assert_eq!(*error, json!({ "kind": "not_found", "message": message }));

    let sleeper = guest.exec("main", "sleeper", &process("echo up; sleep 100000"));
    sleeper.stdout.wait_for("up");
    let listed = guest.ask(&["ps", "main"]);
    let named =
        listed["processes"].as_array().unwrap().iter().filter(|p| p["exec_id"] == "sleeper");
    assert_eq!(named.count(), 1, "{listed}");
    guest.oci(&["kill", "--exec", "sleeper", "main", "KILL"]).text();
    assert_eq!(sleeper.end().status, ended(137));

    let many: Vec<_> = (0..20)
        .map(|number| (number, format!("echo {number}; exit {number}")))
        .map(|(number, line)| (number, guest.exec("main", &format!("n{number}"), &process(&line))))
        .collect();
    for (number, keeper) in many {
        let output = keeper.end();
        let said = (code(&output), String::from_utf8_lossy(&output.stdout).into_owned());
        assert_eq!(said, (number, format!("{number}\n")), "{output:?}");
    }
}

fn what_cannot_be_run_is_told_before_it_is_started() {
    let guest = Guest::boot();
    let failed = |id: &str, spec| {
        let (keeper, state) = guest.try_create(id, &spec);
        let output = keeper.end();
        assert_eq!((output.stdout.len(), output.stderr.len()), (0, 0), "{output:?}");
        guest.oci(&["delete", id]).text();
        (code(&output), state["error"]["kind"].clone(), state["error"]["message"].clone())
    };
    let of = |program: &str| {
        let mut spec = spec("");
        spec["process"]["args"] = json!([program]);
        spec
    };
    let message = json!("exec: \"nosuch\": executable file not found in $PATH");
    assert_eq!(failed("missing", of("nosuch")), (127, json!("not_found"), message));
    let message = json!("exec: \"/etc/data\": permission denied");
    assert_eq!(failed("data", of("/etc/data")), (126, json!("not_executable"), message));
    let (code, kind, _) = failed("malformed", json!({ "ociVersion": "1.2.0", "process": 3 }));
    assert_eq!((code, kind), (125, json!("invalid")));
    let mut unmounted = spec("true");
    let volume =
        json!({ "destination": "/v", "type": "bind", "source": "/nosuch", "options": ["rbind"] });
    unmounted["mounts"].as_array_mut().unwrap().push(volume);
    let (code, kind, message) = failed("unmounted", unmounted);
    assert_eq!((code, kind), (125, json!("system")));
    assert!(message.as_str().unwrap().contains("/nosuch"), "{message}");
    assert_eq!(
        guest.run("ls -A /run/cube/oci; ls -d /sys/fs/cgroup/cube/*/ 2>/dev/null || true"),
        ""
    );
}
