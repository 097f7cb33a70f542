//! Which devices a container may use: a program of the kernel's on its control group
//! (cgroup-v2.rst "Device controller"; `BPF_PROG_TYPE_CGROUP_DEVICE`).
//!
//! Without it, who may make device files could make one of another container's disk.

use crate::error::Error;
use crate::spec::DeviceRule;
use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Instruction {
    code: u8,
    /// The target in the lower half, the source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// `struct bpf_cgroup_dev_ctx` has these at 0, 4 and 8.
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

const LOAD_WORD: u8 = 0x61;
const COPY: u8 = 0xbc;
const SET: u8 = 0xb7;
const AND: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
const JUMP: u8 = 0x05;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const JUMP_IF_ANY_BIT: u8 = 0x45;
const EXIT: u8 = 0x95;

const ALL: i32 = 7;
/// Instructions of an answer.
const ANSWER: usize = 2;

fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers, offset, immediate }
}

/// The kernel's bits of access.
fn access(rule: &DeviceRule) -> i32 {
    let bit = |letter| match letter {
        'm' => 1,
        'r' => 2,
        'w' => 4,
        _ => 0,
    };
    rule.access.chars().map(bit).fold(0, |all, bit| all | bit)
}

/// The program: rules from the last to the first, and a refusal if none matches.
fn compile(rules: &[DeviceRule]) -> Vec<Instruction> {
    let from_context = 1 << 4;
    let mut program = vec![
        instruction(LOAD_WORD, KIND | from_context, 0, 0),
        instruction(COPY, ACCESS | KIND << 4, 0, 0),
        instruction(SHIFT_RIGHT, ACCESS, 0, 16),
        instruction(AND, KIND, 0, 0xffff),
        instruction(LOAD_WORD, MAJOR | from_context, 4, 0),
        instruction(LOAD_WORD, MINOR | from_context, 8, 0),
    ];
    for rule in rules.iter().rev() {
        let compiled = compile_rule(rule);
        let decides = compiled.len() == ANSWER;
        program.extend(compiled);
        if decides {
            // The kernel refuses a program with instructions that are never reached.
            return program;
        }
    }
    program.extend(answer(false));
    program
}

fn answer(allow: bool) -> [Instruction; ANSWER] {
    [instruction(SET, 0, 0, i32::from(allow)), instruction(EXIT, 0, 0, 0)]
}

/// Falls through where it does not match. A grant matches if it grants all that is asked for, a
/// refusal if it refuses any of it.
fn compile_rule(rule: &DeviceRule) -> Vec<Instruction> {
    let mut tests = Vec::new();
    let mut unless = |register: u8, value: i32| {
        tests.push(instruction(JUMP_UNLESS_EQUAL, register, 0, value));
    };
    if let Some(kind) = rule.kind {
        unless(KIND, if kind == 'b' { 1 } else { 2 });
    }
    for (register, number) in [(MAJOR, rule.major), (MINOR, rule.minor)] {
        if let Some(number) = number {
            unless(register, number.cast_signed());
        }
    }
    let access = access(rule);
    if rule.allow && access != ALL {
        tests.push(instruction(JUMP_IF_ANY_BIT, ACCESS, 0, ALL & !access));
    } else if !rule.allow && access != ALL {
        // Over the jump that follows.
        tests.push(instruction(JUMP_IF_ANY_BIT, ACCESS, 1, access));
        tests.push(instruction(JUMP, 0, 0, 0));
    }
    let length = tests.len();
    for (at, test) in tests.iter_mut().enumerate() {
        if test.offset == 0 {
            // Over the tests that follow, and the answer.
            test.offset = i16::try_from(length - at - 1 + ANSWER).unwrap_or(i16::MAX);
        }
    }
    tests.extend(answer(rule.allow));
    tests
}

/// `union bpf_attr`, as far as it is used: for a load, and for an attachment.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    rest: [u64; 13],
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
    rest: [u64; 14],
}

const BPF_PROG_LOAD: i64 = 5;
const BPF_PROG_ATTACH: i64 = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_F_ALLOW_MULTI: u32 = 2;

/// Puts the rules on a control group, for as long as that lives.
///
/// # Errors
/// [`Error::System`], also if the guest's kernel cannot do it: that is not left out in silence.
pub fn attach(rules: &[DeviceRule], cgroup: &Path) -> Result<(), Error> {
    let attach = || -> io::Result<()> {
        let program = load(&compile(rules))?;
        let cgroup = File::open(cgroup)?;
        let number = |fd: RawFd| u32::try_from(fd).unwrap_or(u32::MAX);
        let attributes = Attach {
            target: number(cgroup.as_raw_fd()),
            program: number(program.as_raw_fd()),
            kind: BPF_CGROUP_DEVICE,
            flags: BPF_F_ALLOW_MULTI,
            rest: [0; 14],
        };
        // SAFETY: the structure is as large as it says, and has no pointers.
        let done = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                BPF_PROG_ATTACH,
                &raw const attributes,
                size_of::<Attach>(),
            )
        };
        Errno::result(done).map(drop).map_err(Into::into)
    };
    attach().map_err(Error::system("restrict the use of devices"))
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"Apache-2.0";
    let attributes = Load {
        kind: BPF_PROG_TYPE_CGROUP_DEVICE,
        count: u32::try_from(program.len()).unwrap_or(u32::MAX),
        instructions: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        rest: [0; 13],
    };
    // SAFETY: the structure is as large as it says; its pointers are to as many instructions as it
    // says, and to a text with an end.
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attributes, size_of::<Load>())
    };
    let fd = RawFd::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
    // SAFETY: it has just been opened, for nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel would.
    fn run(program: &[Instruction], kind: u32, access: u32, major: u32, minor: u32) -> bool {
        let context = [access << 16 | kind, major, minor];
        let (mut registers, mut at) = ([0_i64; 16], 0_usize);
        loop {
            let Instruction { code, registers: pair, offset, immediate } = program[at];
            let (target, source) = (usize::from(pair & 15), usize::from(pair >> 4));
            let value = i64::from(immediate);
            let jump = match code {
                LOAD_WORD => {
                    registers[target] = context[offset as usize / 4].into();
                    false
                }
                COPY => {
                    registers[target] = registers[source];
                    false
                }
                SET => {
                    registers[target] = value;
                    false
                }
                AND => {
                    registers[target] &= value;
                    false
                }
                SHIFT_RIGHT => {
                    registers[target] >>= value;
                    false
                }
                JUMP => true,
                JUMP_UNLESS_EQUAL => registers[target] != value,
                JUMP_IF_ANY_BIT => registers[target] & value != 0,
                _ => return registers[0] == 1,
            };
            at += 1 + if jump { offset as usize } else { 0 };
        }
    }

    const CHAR: u32 = 2;
    const BLOCK: u32 = 1;
    const MAKE: u32 = 1;
    const READ: u32 = 2;
    const WRITE: u32 = 4;

    fn rule(
        allow: bool,
        kind: Option<char>,
        numbers: Option<(u32, u32)>,
        access: &str,
    ) -> DeviceRule {
        let (major, minor) = (numbers.map(|numbers| numbers.0), numbers.map(|numbers| numbers.1));
        DeviceRule { allow, kind, major, minor, access: access.into() }
    }

    #[test]
    fn the_last_rule_that_matches_decides() {
        let program = compile(&[
            rule(false, None, None, "rwm"),
            rule(true, Some('c'), Some((1, 3)), "rwm"),
            rule(true, Some('b'), Some((254, 16)), "r"),
            rule(true, Some('b'), None, "m"),
        ]);
        assert!(run(&program, CHAR, READ | WRITE, 1, 3));
        assert!(!run(&program, CHAR, READ, 1, 4));
        assert!(run(&program, BLOCK, READ, 254, 16));
        assert!(!run(&program, BLOCK, READ | WRITE, 254, 16));
        assert!(run(&program, BLOCK, MAKE, 8, 0));
        assert!(!run(&program, BLOCK, READ, 254, 0));
    }

    #[test]
    fn a_refusal_of_one_access_refuses_it_with_any_other() {
        let program =
            compile(&[rule(true, None, None, "rwm"), rule(false, None, Some((1, 1)), "w")]);
        assert!(run(&program, CHAR, READ, 1, 1));
        assert!(!run(&program, CHAR, READ | WRITE, 1, 1));
        assert!(run(&program, CHAR, READ | WRITE, 1, 2));
    }

    #[test]
    fn nothing_follows_a_rule_that_decides_all() {
        let program = compile(&[rule(false, None, None, "r"), rule(true, None, None, "rwm")]);
        assert_eq!(program.len(), 6 + ANSWER);
        assert!(run(&program, CHAR, READ, 9, 9));
    }

    #[test]
    fn without_rules_nothing_may_be_used() {
        assert!(!run(&compile(&[]), CHAR, READ, 1, 3));
    }
}
