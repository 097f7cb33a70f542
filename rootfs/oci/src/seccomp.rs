//! Seccomp profiles of the OCI, compiled by `seccompiler`.
//!
//! Its filters know two actions each, a profile any number. The kernel runs all filters of a
//! process and takes the strictest answer (seccomp(2)), so a profile becomes one filter that lets
//! pass whatever has a rule and gives the default to the rest, and one more for each action other
//! than to allow.

use crate::spec::Error;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use syscalls::Sysno;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A profile, ready for the kernel.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    programs: Vec<BpfProgram>,
}

impl Profile {
    /// Compiles `linux.seccomp` of a spec.
    ///
    /// # Errors
    /// [`Error::Seccomp`] if it says something that is not understood, or cannot be had here.
    pub fn compile(profile: &Value) -> Result<Self, Error> {
        let errno = profile["defaultErrnoRet"].as_u64();
        let default = action(&profile["defaultAction"], errno)?;
        let (mut passing, mut others) = (Rules::new(), Vec::<(SeccompAction, Rules)>::new());
        let entries = profile["syscalls"].as_array();
        for entry in entries.into_iter().flatten() {
            let taken = action(&entry["action"], entry["errnoRet"].as_u64())?;
            // What happens anyway.
            if taken == default {
                continue;
            }
            let conditions = conditions(&entry["args"])?;
            for number in numbers(&entry["names"]) {
                add(&mut passing, number, &conditions);
                if taken == SeccompAction::Allow {
                    continue;
                }
                match others.iter_mut().find(|(other, _)| *other == taken) {
                    Some((_, rules)) => add(rules, number, &conditions),
                    None => {
                        let mut rules = Rules::new();
                        add(&mut rules, number, &conditions);
                        others.push((taken.clone(), rules));
                    }
                }
            }
        }
        let mut programs = Vec::new();
        for (taken, rules) in others {
            programs.push(program(rules, SeccompAction::Allow, taken)?);
        }
        // The last, since it may forbid the installation of another.
        if default != SeccompAction::Allow {
            programs.push(program(passing, default, SeccompAction::Allow)?);
        }
        Ok(Self { programs })
    }

    /// Puts it on this thread, for good. Needs `no_new_privs`, or `CAP_SYS_ADMIN`.
    pub fn install(&self) -> io::Result<()> {
        self.programs.iter().try_for_each(install)
    }
}

fn install(program: &BpfProgram) -> io::Result<()> {
    #[repr(C)]
    struct Program {
        len: libc::c_ushort,
        filter: *const seccompiler::sock_filter,
    }
    let len = program.len().try_into().map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let program = Program { len, filter: program.as_ptr() };
    // SAFETY: the kernel copies the program, whose length is true.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn refused(what: impl std::fmt::Display) -> Error {
    Error::Seccomp(what.to_string())
}

fn program(
    rules: Rules,
    otherwise: SeccompAction,
    matching: SeccompAction,
) -> Result<BpfProgram, Error> {
    let filter = SeccompFilter::new(rules, otherwise, matching, TargetArch::x86_64);
    filter.and_then(TryInto::try_into).map_err(refused)
}

fn add(rules: &mut Rules, number: i64, conditions: &[SeccompRule]) {
    let chain = rules.entry(number);
    match chain {
        std::collections::btree_map::Entry::Vacant(vacant) => {
            vacant.insert(conditions.to_vec());
        }
        // An empty chain holds always.
        std::collections::btree_map::Entry::Occupied(mut occupied) => {
            let chain = occupied.get_mut();
            if conditions.is_empty() {
                chain.clear();
            } else if !chain.is_empty() {
                chain.extend_from_slice(conditions);
            }
        }
    }
}

fn action(name: &Value, errno: Option<u64>) -> Result<SeccompAction, Error> {
    // Not given, it is EPERM.
    let number = match errno.map(u16::try_from) {
        None => libc::EPERM.cast_unsigned(),
        Some(Ok(number)) => number.into(),
        Some(Err(_)) => return Err(refused(format_args!("no error number: {errno:?}"))),
    };
    Ok(match name.as_str() {
        Some("SCMP_ACT_ALLOW") => SeccompAction::Allow,
        Some("SCMP_ACT_ERRNO") => SeccompAction::Errno(number),
        Some("SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD") => SeccompAction::KillThread,
        Some("SCMP_ACT_KILL_PROCESS") => SeccompAction::KillProcess,
        Some("SCMP_ACT_TRAP") => SeccompAction::Trap,
        Some("SCMP_ACT_TRACE") => SeccompAction::Trace(number),
        Some("SCMP_ACT_LOG") => SeccompAction::Log,
        Some("SCMP_ACT_NOTIFY") => return Err(refused("SCMP_ACT_NOTIFY is not supported")),
        _ => return Err(refused(format_args!("no action: {name}"))),
    })
}

/// Those that this processor has: profiles name the calls of all.
fn numbers(names: &Value) -> impl Iterator<Item = i64> {
    let names = names.as_array().into_iter().flatten().filter_map(Value::as_str);
    names.filter_map(|name| Some(i64::from(name.parse::<Sysno>().ok()?.id())))
}

/// The rules of one entry: all conditions hold, or, if several are about one argument, any.
fn conditions(args: &Value) -> Result<Vec<SeccompRule>, Error> {
    let args: Vec<_> = args.as_array().into_iter().flatten().collect();
    let mut seen = [0_u8; 6];
    let mut all = Vec::new();
    for arg in args {
        let index = arg["index"].as_u64().and_then(|index| u8::try_from(index).ok());
        let index = index.filter(|index| *index < 6);
        let index = index.ok_or_else(|| refused(format_args!("no argument: {}", arg["index"])))?;
        seen[usize::from(index)] += 1;
        let (value, other) = (arg["value"].as_u64().unwrap_or(0), arg["valueTwo"].as_u64());
        let (operator, value) = match arg["op"].as_str() {
            Some("SCMP_CMP_NE") => (SeccompCmpOp::Ne, value),
            Some("SCMP_CMP_LT") => (SeccompCmpOp::Lt, value),
            Some("SCMP_CMP_LE") => (SeccompCmpOp::Le, value),
            Some("SCMP_CMP_EQ") => (SeccompCmpOp::Eq, value),
            Some("SCMP_CMP_GE") => (SeccompCmpOp::Ge, value),
            Some("SCMP_CMP_GT") => (SeccompCmpOp::Gt, value),
            // The first value is the mask.
            Some("SCMP_CMP_MASKED_EQ") => (SeccompCmpOp::MaskedEq(value), other.unwrap_or(0)),
            _ => return Err(refused(format_args!("no comparison: {}", arg["op"]))),
        };
        let condition = SeccompCondition::new(index, SeccompCmpArgLen::Qword, operator, value);
        all.push(condition.map_err(refused)?);
    }
    let rule = |conditions| SeccompRule::new(conditions).map_err(refused);
    if seen.iter().any(|count| *count > 1) {
        return all.into_iter().map(|condition| rule(vec![condition])).collect();
    }
    if all.is_empty() { Ok(Vec::new()) } else { Ok(vec![rule(all)?]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(names: &[&str], action: &str) -> Value {
        json!({ "names": names, "action": action })
    }

    fn compile(default: &str, syscalls: &[Value]) -> Result<Profile, Error> {
        Profile::compile(&json!({ "defaultAction": default, "syscalls": syscalls }))
    }

    #[test]
    fn each_action_but_to_allow_is_a_filter_more() {
        let allowed = entry(&["read", "write", "chown32"], "SCMP_ACT_ALLOW");
        let mut absent = entry(&["clone3"], "SCMP_ACT_ERRNO");
        absent["errnoRet"] = json!(38);
        let profile = compile("SCMP_ACT_ERRNO", &[allowed, absent]).unwrap();
        assert_eq!(profile.programs.len(), 2);
        let profile = compile("SCMP_ACT_ALLOW", &[entry(&["mount"], "SCMP_ACT_KILL")]).unwrap();
        assert_eq!(profile.programs.len(), 1);
        assert_eq!(compile("SCMP_ACT_ALLOW", &[]).unwrap().programs.len(), 0);
    }

    #[test]
    fn what_is_not_understood_is_refused_and_never_left_out() {
        let with = |args| json!({ "names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [args] });
        for (profile, said) in [
            (compile("SCMP_ACT_FUTURE", &[]), "no action"),
            (compile("SCMP_ACT_NOTIFY", &[]), "not supported"),
            (compile("SCMP_ACT_KILL", &[with(json!({ "index": 6 }))]), "no argument"),
            (compile("SCMP_ACT_KILL", &[with(json!({ "index": 0, "op": "x" }))]), "no comparison"),
            (Profile::compile(&json!({})), "no action"),
        ] {
            let error = profile.unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn conditions_on_one_argument_are_alternatives_and_on_several_all_must_hold() {
        let equal = |index, value| json!({ "index": index, "value": value, "op": "SCMP_CMP_EQ" });
        let rules = |args: Value| conditions(&args).unwrap().len();
        assert_eq!(rules(json!([equal(0, 1), equal(0, 2)])), 2);
        assert_eq!(rules(json!([equal(0, 1), equal(1, 2)])), 1);
        assert_eq!(rules(json!(null)), 0);
    }

    #[test]
    fn a_rule_without_conditions_holds_always() {
        let rule =
            |value| conditions(&json!([{ "op": "SCMP_CMP_EQ", "index": 0, "value": value }]));
        let mut rules = Rules::new();
        add(&mut rules, 1, &rule(1).unwrap());
        add(&mut rules, 1, &[]);
        add(&mut rules, 1, &rule(2).unwrap());
        assert_eq!(rules[&1].len(), 0);
    }

    /// What a shell says when it runs a line under a profile that allows all calls but `without`,
    /// and what `more` adds.
    fn shell(line: &str, without: &[&str], more: &[Value]) -> String {
        let all = Sysno::iter().map(|number| number.name()).filter(|name| !without.contains(name));
        let mut entries = vec![entry(&all.collect::<Vec<_>>(), "SCMP_ACT_ALLOW")];
        entries.extend_from_slice(more);
        let profile = compile("SCMP_ACT_ERRNO", &entries).unwrap();
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", line]);
        let install = move || {
            // SAFETY: sets a number.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            profile.install()
        };
        // SAFETY: system calls only, on memory that was made before.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, install) };
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn what_is_not_on_the_list_is_refused_by_the_kernel() {
        let line = "mkdir /tmp/cube-oci-seccomp 2>/dev/null && echo made; kill -0 $$ && echo fine";
        assert_eq!(shell(line, &["mkdir", "mkdirat"], &[]), "fine\n");
    }

    #[test]
    fn conditions_and_other_actions_are_the_kernels_too() {
        let zero = json!({ "index": 1, "value": 0, "op": "SCMP_CMP_EQ" });
        let asks = json!({ "names": ["kill"], "action": "SCMP_ACT_ALLOW", "args": [zero] });
        let dies = entry(&["mkdir", "mkdirat"], "SCMP_ACT_KILL_PROCESS");
        let line = "kill -0 $$ && echo asked; kill -CONT $$ 2>/dev/null || echo refused; \
            mkdir /tmp/cube-oci-seccomp 2>/dev/null; echo $?";
        assert_eq!(shell(line, &["kill"], &[asks, dies]), "asked\nrefused\n159\n");
    }
}
