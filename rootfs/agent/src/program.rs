//! What to execute, worked out before the fork: after it nothing may be allocated.

use crate::refusal::Refusal;
use guest_protocol::Spawn;
use std::ffi::{CString, c_char};
use std::fs;
use std::ptr;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What `execve` takes.
pub struct Program {
    /// To be tried in turn.
    pub candidates: Vec<CString>,
    /// Its arguments, the program's own name first.
    pub argv: Vec<CString>,
    /// Its environment, `NAME=value`.
    pub envp: Vec<CString>,
    /// The `PATH` that was searched, if one was.
    pub searched: Option<String>,
}

/// An account of the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Account {
    /// The main group.
    pub gid: u32,
    /// The home directory.
    pub home: String,
}

impl Program {
    /// Works out what `spawn` wants executed, `home` being its user's.
    pub fn new(spawn: &Spawn, home: &str) -> Result<Self, Refusal> {
        let program = spawn.argv.first().filter(|program| !program.is_empty());
        let program = program.ok_or(Refusal::Invalid("no program to spawn"))?;
        let env = environment(spawn, home)?;
        let (candidates, searched) = if program.contains('/') {
            (vec![c_string(program)?], None)
        } else {
            let path = env.iter().rev().find(|(name, _)| name == "PATH");
            let path = path.map_or(DEFAULT_PATH, |(_, value)| value.as_str());
            // An empty entry is the working directory, by tradition.
            let entries = path.split(':').map(|dir| if dir.is_empty() { "." } else { dir });
            let candidates = entries.map(|dir| c_string(&format!("{dir}/{program}")));
            (candidates.collect::<Result<_, _>>()?, Some(path.to_owned()))
        };
        Ok(Self {
            candidates,
            argv: spawn.argv.iter().map(|arg| c_string(arg)).collect::<Result<_, _>>()?,
            envp: env
                .iter()
                .map(|(name, value)| c_string(&format!("{name}={value}")))
                .collect::<Result<_, _>>()?,
            searched,
        })
    }

    /// `strings` as the kernel wants them; valid as long as `strings` is.
    pub fn pointers(strings: &[CString]) -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
    }
}

fn c_string(text: &str) -> Result<CString, Refusal> {
    CString::new(text).map_err(|_| Refusal::Invalid("a string to spawn with has a NUL in it"))
}

/// The defaults, then what the host wants; a later value replaces an earlier one.
fn environment(spawn: &Spawn, home: &str) -> Result<Vec<(String, String)>, Refusal> {
    let mut env: Vec<(String, String)> = Vec::new();
    if !spawn.clear_env {
        env.push(("PATH".into(), DEFAULT_PATH.into()));
        env.push(("HOME".into(), home.into()));
        if spawn.tty.is_some() {
            env.push(("TERM".into(), "xterm".into()));
        }
    }
    for (name, value) in &spawn.env {
        if name.is_empty() || name.contains('=') {
            return Err(Refusal::Invalid("a variable's name is empty or has a '=' in it"));
        }
        match env.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => old.clone_from(value),
            None => env.push((name.clone(), value.clone())),
        }
    }
    Ok(env)
}

/// Looks `uid` up in the guest's accounts.
pub fn account(uid: u32) -> Account {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    find_account(&passwd, uid).unwrap_or(Account { gid: 0, home: "/".into() })
}

fn find_account(passwd: &str, uid: u32) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        let mut next = || fields.next();
        (next()?.parse() == Ok(uid)).then_some(())?;
        let gid = next()?.parse().ok()?;
        let home = fields.nth(1).filter(|home| !home.is_empty()).unwrap_or("/").to_owned();
        Some(Account { gid, home })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(strings: &[CString]) -> Vec<&str> {
        strings.iter().map(|string| string.to_str().unwrap()).collect()
    }

    #[test]
    fn a_bare_name_is_looked_up_in_the_path_of_the_request() {
        let spawn = Spawn::new(["ls"]).env("PATH", "/a::/b");
        let program = Program::new(&spawn, "/root").unwrap();
        assert_eq!(texts(&program.candidates), ["/a/ls", "./ls", "/b/ls"]);
        assert_eq!(program.searched.as_deref(), Some("/a::/b"));
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        let program = Program::new(&Spawn::new(["./ls"]), "/").unwrap();
        assert_eq!(texts(&program.candidates), ["./ls"]);
        assert_eq!(program.searched, None);
    }

    #[test]
    fn the_environment_starts_with_defaults_that_can_be_replaced() {
        let spawn = Spawn::new(["x"]).env("HOME", "/h").env("A", "1").env("A", "2");
        let path = format!("PATH={DEFAULT_PATH}");
        assert_eq!(
            texts(&Program::new(&spawn, "/root").unwrap().envp),
            [path.as_str(), "HOME=/h", "A=2"]
        );
        let spawn = Spawn { clear_env: true, ..spawn };
        assert_eq!(texts(&Program::new(&spawn, "/root").unwrap().envp), ["HOME=/h", "A=2"]);
    }

    #[test]
    fn what_exec_cannot_take_is_refused() {
        for spawn in [
            Spawn::default(),
            Spawn::new([""]),
            Spawn::new(["a\0b"]),
            Spawn::new(["a"]).env("", "b"),
            Spawn::new(["a"]).env("b=c", "d"),
            Spawn::new(["a"]).env("b", "c\0"),
        ] {
            assert!(matches!(Program::new(&spawn, "/"), Err(Refusal::Invalid(_))), "{spawn:?}");
        }
    }

    #[test]
    fn accounts_are_found_by_uid() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nu:x:7:8::/home/u:/bin/sh\nv:x:9:9::\n";
        let found = |gid, home: &str| Some(Account { gid, home: home.into() });
        assert_eq!(find_account(passwd, 7), found(8, "/home/u"));
        assert_eq!(find_account(passwd, 9), found(9, "/"));
        assert_eq!(find_account(passwd, 8), None);
    }
}
