//! The guests that the doctor runs: a few dozen bytes each, assembled by hand and kept beside
//! their mnemonics, so that a report can name the instruction at which a guest stopped.
//!
//! Each one ends with `hlt`. What it has computed lies in guest memory, where the host compares
//! it with `expected`: an instruction that "ran" without its effect counts as failed.

/// Where code starts, in both modes.
pub(super) const CODE: u64 = 0x8000;
/// Where the exception handlers lie (long mode only), one every [`HANDLER_SIZE`] bytes.
pub(super) const HANDLERS: u64 = 0x8800;
/// Distance between two handlers.
pub(super) const HANDLER_SIZE: u64 = 16;
/// Exceptions of the architecture, hence handlers.
pub(super) const VECTORS: u8 = 32;
/// The vector of `int3`, the one exception that a program wants.
const BREAKPOINT: u8 = 3;
/// Results; [`FINISHED`] and [`FAULT`] are in this page as well.
pub(super) const RESULT: u64 = 0x9000;
/// The byte that the last instruction before `hlt` sets to 1.
const FINISHED: u64 = 0x9001;
/// The byte that an unwanted exception sets to its vector plus one before it halts.
pub(super) const FAULT: u64 = 0x9002;
/// Where results end.
pub(super) const RESULTS_END: u64 = 0xb000;
/// An aligned area for XSAVE.
const XSAVE_AREA: u64 = 0xa000;

/// The port that CubeVMM uses for guest debug bytes.
pub(super) const PORT: u16 = 0xd4;
/// The byte that the port programs write there.
pub(super) const GREETING: u8 = b'k';

/// The timed loop runs in this many parts, each of which ends with a greeting.
pub(super) const LOOP_PARTS: u64 = 10;
/// Instructions of one part, not counting the few between two parts.
pub(super) const PART_INSTRUCTIONS: u64 = 1_000_000;
/// Iterations of one part: each is two instructions.
pub(super) const PART_ITERATIONS: u64 = PART_INSTRUCTIONS / 2;

/// How the vCPU is set up before the first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// As after reset, with flat zero segments.
    Real,
    /// 64-bit, paging on, IDT with a breakpoint handler.
    Long,
}

/// What CPUID must offer before a guest may be blamed for not executing an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feature {
    /// Part of every x86-64 processor.
    Baseline,
    /// CPUID.1:ECX.CMPXCHG16B
    Cmpxchg16b,
    /// CPUID.1:ECX.XSAVE
    Xsave,
    /// CPUID.1:ECX.AVX, and XSAVE to enable it.
    Avx,
}

impl Feature {
    /// Whether CPUID leaf 1 with this ECX offers the feature.
    pub(super) fn offered_by(self, leaf1_ecx: u32) -> bool {
        const CX16: u32 = 1 << 13;
        const XSAVE: u32 = 1 << 26;
        const AVX: u32 = 1 << 28;
        let wanted = match self {
            Self::Baseline => 0,
            Self::Cmpxchg16b => CX16,
            Self::Xsave => XSAVE,
            Self::Avx => XSAVE | AVX,
        };
        leaf1_ecx & wanted == wanted
    }
}

type Instruction = (&'static str, &'static [u8]);

/// One guest.
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) mode: Mode,
    pub(super) needs: Feature,
    instructions: &'static [Instruction],
    /// Guest-physical address and bytes that must be there after `hlt`.
    pub(super) expected: &'static [(u64, &'static [u8])],
    /// How many times [`GREETING`] must have arrived at [`PORT`].
    pub(super) greetings: usize,
    /// Whether an unmodified Linux kernel cannot do without it.
    pub(super) decisive: bool,
}

impl Program {
    /// The bytes to load at [`CODE`].
    pub(super) fn code(&self) -> Vec<u8> {
        self.instructions.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect()
    }

    /// The instruction that begins at or contains `rip`.
    pub(super) fn instruction_at(&self, rip: u64) -> Option<&'static str> {
        if rip >= HANDLERS {
            return (rip < RESULT).then_some("exception handler");
        }
        let mut end = CODE;
        self.instructions.iter().find_map(|(mnemonic, bytes)| {
            end += bytes.len() as u64;
            (CODE..end).contains(&rip).then_some(*mnemonic)
        })
    }
}

/// The handler of one exception. That of the breakpoint marks it as handled and returns:
/// `mov byte [RESULT], 1; iretq`. The others leave their vector: `mov byte [FAULT], n; hlt`.
pub(super) fn handler(vector: u8) -> Vec<u8> {
    match vector {
        BREAKPOINT => b"\xc6\x04\x25\x00\x90\x00\x00\x01\x48\xcf".to_vec(),
        _ => [b"\xc6\x04\x25\x02\x90\x00\x00".as_slice(), &[vector + 1], b"\xf4"].concat(),
    }
}

/// Whether the processor pushes an error code below the return address (Intel SDM vol. 3, 6.15).
pub(super) fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21)
}

const FINISH: Instruction = ("mov byte [FINISHED], 1", b"\xc6\x04\x25\x01\x90\x00\x00\x01");
const HLT: Instruction = ("hlt", b"\xf4");
const LOAD_GREETING: Instruction = ("mov al, 'k'", b"\xb0\x6b");
const OUT_GREETING: Instruction = ("out 0xd4, al", b"\xe6\xd4");
const CLEAR_EDX: Instruction = ("xor edx, edx", b"\x31\xd2");
const DONE: (u64, &[u8]) = (FINISHED, &[1]);

/// Everything but the timed loop, the most modest first.
pub(super) const PROGRAMS: &[Program] = &[
    Program {
        name: "real-mode",
        mode: Mode::Real,
        needs: Feature::Baseline,
        instructions: &[LOAD_GREETING, OUT_GREETING, HLT],
        expected: &[],
        greetings: 1,
        decisive: true,
    },
    Program {
        name: "long-mode",
        mode: Mode::Long,
        needs: Feature::Baseline,
        instructions: &[LOAD_GREETING, OUT_GREETING, FINISH, HLT],
        expected: &[DONE],
        greetings: 1,
        decisive: true,
    },
    Program {
        name: "int3",
        mode: Mode::Long,
        needs: Feature::Baseline,
        instructions: &[("int3", b"\xcc"), FINISH, HLT],
        expected: &[(RESULT, &[1]), DONE],
        greetings: 0,
        decisive: true,
    },
    Program {
        name: "xsave",
        mode: Mode::Long,
        needs: Feature::Xsave,
        instructions: &[
            ("fninit", b"\xdb\xe3"),
            ("mov eax, 3", b"\xb8\x03\x00\x00\x00"),
            CLEAR_EDX,
            ("xsave [XSAVE_AREA]", b"\x0f\xae\x24\x25\x00\xa0\x00\x00"),
            ("xrstor [XSAVE_AREA]", b"\x0f\xae\x2c\x25\x00\xa0\x00\x00"),
            FINISH,
            HLT,
        ],
        // The x87 control word that fninit sets is the area's first field.
        expected: &[(XSAVE_AREA, &[0x7f, 0x03]), DONE],
        greetings: 0,
        decisive: true,
    },
    Program {
        name: "cmpxchg16b",
        mode: Mode::Long,
        needs: Feature::Cmpxchg16b,
        instructions: &[
            ("xor eax, eax", b"\x31\xc0"),
            CLEAR_EDX,
            ("mov ebx, 0x11111111", b"\xbb\x11\x11\x11\x11"),
            ("mov ecx, 0x22222222", b"\xb9\x22\x22\x22\x22"),
            ("lock cmpxchg16b [RESULT + 0x10]", b"\xf0\x48\x0f\xc7\x0c\x25\x10\x90\x00\x00"),
            FINISH,
            HLT,
        ],
        expected: &[
            (RESULT + 0x10, &[0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0, 0x22, 0x22, 0x22, 0x22]),
            DONE,
        ],
        greetings: 0,
        decisive: true,
    },
    Program {
        name: "vex",
        mode: Mode::Long,
        needs: Feature::Avx,
        instructions: &[
            ("xor ecx, ecx", b"\x31\xc9"),
            ("mov eax, 7", b"\xb8\x07\x00\x00\x00"),
            CLEAR_EDX,
            ("xsetbv", b"\x0f\x01\xd1"),
            // Leaves the guest once, so that KVM has to bring XCR0 back.
            LOAD_GREETING,
            OUT_GREETING,
            ("vpcmpeqd xmm0, xmm0, xmm0", b"\xc5\xf9\x76\xc0"),
            ("vmovdqu [RESULT + 0x20], xmm0", b"\xc5\xfa\x7f\x04\x25\x20\x90\x00\x00"),
            FINISH,
            HLT,
        ],
        expected: &[(RESULT + 0x20, &[0xff; 16]), DONE],
        greetings: 1,
        // The kernel itself boots without AVX; programs in the guest do not run without it once
        // CPUID has promised it.
        decisive: false,
    },
];

/// [`LOOP_PARTS`] times a loop of `dec ecx; jnz`, whose RCX tells how many iterations are left when
/// it is interrupted.
pub(super) const TIMED_LOOP: Program = Program {
    name: "loop",
    mode: Mode::Long,
    needs: Feature::Baseline,
    instructions: &[
        ("mov esi, LOOP_PARTS", b"\xbe\x0a\x00\x00\x00"),
        ("mov ecx, PART_ITERATIONS", b"\xb9\x20\xa1\x07\x00"),
        ("dec ecx", b"\xff\xc9"),
        ("jnz to dec ecx", b"\x75\xfc"),
        LOAD_GREETING,
        OUT_GREETING,
        ("dec esi", b"\xff\xce"),
        ("jnz to mov ecx", b"\x75\xef"),
        FINISH,
        HLT,
    ],
    expected: &[DONE],
    greetings: LOOP_PARTS as usize,
    decisive: true,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str) -> &'static Program {
        PROGRAMS.iter().find(|program| program.name == name).unwrap()
    }

    #[test]
    fn a_stop_is_named_by_the_instruction_it_hit() {
        let xsave = program("xsave");
        assert_eq!(xsave.instruction_at(CODE), Some("fninit"));
        assert_eq!(xsave.instruction_at(CODE + 9), Some("xsave [XSAVE_AREA]"));
        assert_eq!(xsave.instruction_at(CODE + 16), Some("xsave [XSAVE_AREA]"));
        assert_eq!(xsave.instruction_at(CODE + 17), Some("xrstor [XSAVE_AREA]"));
    }

    #[test]
    fn a_stop_outside_the_program_has_no_name() {
        let int3 = program("int3");
        assert_eq!(int3.instruction_at(CODE - 1), None);
        assert_eq!(int3.instruction_at(CODE + int3.code().len() as u64), None);
        assert_eq!(int3.instruction_at(HANDLERS), Some("exception handler"));
        assert_eq!(int3.instruction_at(RESULT), None);
    }

    #[test]
    fn every_program_fits_below_the_handler_and_halts() {
        for program in PROGRAMS.iter().chain([&TIMED_LOOP]) {
            let code = program.code();
            assert!(CODE + (code.len() as u64) < HANDLERS, "{}", program.name);
            assert_eq!(code.last(), Some(&0xf4), "{}", program.name);
        }
    }

    #[test]
    fn every_handler_fits_its_place() {
        assert!((0..VECTORS).all(|vector| handler(vector).len() as u64 <= HANDLER_SIZE));
        assert!(HANDLERS + u64::from(VECTORS) * HANDLER_SIZE <= RESULT);
    }

    #[test]
    fn the_loop_counts_what_is_documented() {
        let code = TIMED_LOOP.code();
        let number = |at: usize| u32::from_le_bytes(code[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from(number(1)), LOOP_PARTS);
        assert_eq!(u64::from(number(6)), PART_ITERATIONS);
    }

    #[test]
    fn avx_needs_xsave_as_well() {
        assert!(Feature::Baseline.offered_by(0));
        assert!(!Feature::Avx.offered_by(1 << 28));
        assert!(Feature::Avx.offered_by(1 << 28 | 1 << 26));
        assert!(!Feature::Cmpxchg16b.offered_by(!(1 << 13)));
    }
}
