//! The guest: a loop that does what the records of a script say. Plain 64-bit instructions, which every
//! KVM knows, be it one that interprets its guests.
//!
//! It is entered in long mode, with the first 4 GiB mapped one to one, and without interrupts. A
//! record is 32 bytes: what to do (16 bits), the size of an access as a power of two (16), a step
//! (32), and three numbers a, b and c, which are in rdi, rbp and r8. Random numbers are in r12.

/// Where the first record is: a page behind the code.
pub const SCRIPT: u64 = 0x10_1000;

/// What a record says; places of the table at the end of [`CODE`].
#[derive(Clone, Copy, Debug)]
#[repr(u16)]
pub enum Op {
    /// Nothing any more.
    Halt,
    /// Write b to address a, c times.
    Write,
    /// Read address a, c times.
    Read,
    /// Fail unless what is at a, masked with c, is b.
    Check,
    /// Fail if what is at a is b.
    Differs,
    /// Write b to port a, c times.
    Out,
    /// Read port a, c times.
    In,
    /// Write b to every step-th address from a to c.
    SweepWrite,
    /// Read these.
    SweepRead,
    /// The same with ports.
    SweepOut,
    /// The same with ports.
    SweepIn,
    /// Wait until the 16 bits at a are b, with an exit each time; fail after c times.
    Wait,
    /// Write the byte b to a, c times, one after the other.
    Fill,
    /// Go back to the record at address a, until the records in between were done b times.
    Again,
    /// Random numbers start with b.
    Seed,
    /// Access a plus a random number masked with b, in either direction and any size, c times.
    RandomMemory,
    /// The same with ports.
    RandomPort,
}

/// The code. Its listing is that of an assembler.
#[rustfmt::skip]
pub const CODE: &[u8] = &[
    // start: The first record.
    0xbe, 0x00, 0x10, 0x10, 0x00,              // mov esi,0x101000
    // next: Takes a record apart and jumps to what it says.
    0x0f, 0xb7, 0x06,                          // movzx eax,WORD PTR [rsi]
    0x0f, 0xb7, 0x4e, 0x02,                    // movzx ecx,WORD PTR [rsi+0x2]
    0x44, 0x8b, 0x4e, 0x04,                    // mov r9d,DWORD PTR [rsi+0x4]
    0x48, 0x8b, 0x7e, 0x08,                    // mov rdi,QWORD PTR [rsi+0x8]
    0x48, 0x8b, 0x6e, 0x10,                    // mov rbp,QWORD PTR [rsi+0x10]
    0x4c, 0x8b, 0x46, 0x18,                    // mov r8,QWORD PTR [rsi+0x18]
    0x49, 0x89, 0xf7,                          // mov r15,rsi
    0x48, 0x83, 0xc6, 0x20,                    // add rsi,0x20
    0x48, 0x8d, 0x1d, 0x66, 0x02, 0x00, 0x00,  // lea rbx,[rip+0x266]
    0x48, 0x63, 0x04, 0x83,                    // movsxd rax,DWORD PTR [rbx+rax*4]
    0x48, 0x01, 0xd8,                          // add rax,rbx
    0xff, 0xe0,                                // jmp rax
    // halt:
    0xf4,                                      // hlt
    0xeb, 0xfd,                                // jmp halt
    // write:
    0xe8, 0xb5, 0x01, 0x00, 0x00,              // call store
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xf6,                                // jne write
    0xeb, 0xc3,                                // jmp next
    // read:
    0xe8, 0xc4, 0x01, 0x00, 0x00,              // call load
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xf6,                                // jne read
    0xeb, 0xb7,                                // jmp next
    // check:
    0xe8, 0xb8, 0x01, 0x00, 0x00,              // call load
    0x4c, 0x21, 0xc0,                          // and rax,r8
    0x48, 0x39, 0xe8,                          // cmp rax,rbp
    0x0f, 0x85, 0xe9, 0x01, 0x00, 0x00,        // jne fail
    0xeb, 0xa4,                                // jmp next
    // differs:
    0xe8, 0xa5, 0x01, 0x00, 0x00,              // call load
    0x48, 0x39, 0xe8,                          // cmp rax,rbp
    0x0f, 0x84, 0xd9, 0x01, 0x00, 0x00,        // je fail
    0xeb, 0x94,                                // jmp next
    // outs_:
    0xe8, 0xb0, 0x01, 0x00, 0x00,              // call port_out
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xf6,                                // jne outs_
    0xeb, 0x88,                                // jmp next
    // ins_:
    0xe8, 0xb6, 0x01, 0x00, 0x00,              // call port_in
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xf6,                                // jne ins_
    0xe9, 0x79, 0xff, 0xff, 0xff,              // jmp next
    // sweep_write:
    0xe8, 0x5f, 0x01, 0x00, 0x00,              // call store
    0x4c, 0x01, 0xcf,                          // add rdi,r9
    0x4c, 0x39, 0xc7,                          // cmp rdi,r8
    0x72, 0xf3,                                // jb sweep_write
    0xe9, 0x67, 0xff, 0xff, 0xff,              // jmp next
    // sweep_read:
    0xe8, 0x68, 0x01, 0x00, 0x00,              // call load
    0x4c, 0x01, 0xcf,                          // add rdi,r9
    0x4c, 0x39, 0xc7,                          // cmp rdi,r8
    0x72, 0xf3,                                // jb sweep_read
    0xe9, 0x55, 0xff, 0xff, 0xff,              // jmp next
    // sweep_out:
    0xe8, 0x71, 0x01, 0x00, 0x00,              // call port_out
    0x4c, 0x01, 0xcf,                          // add rdi,r9
    0x4c, 0x39, 0xc7,                          // cmp rdi,r8
    0x72, 0xf3,                                // jb sweep_out
    0xe9, 0x43, 0xff, 0xff, 0xff,              // jmp next
    // sweep_in:
    0xe8, 0x71, 0x01, 0x00, 0x00,              // call port_in
    0x4c, 0x01, 0xcf,                          // add rdi,r9
    0x4c, 0x39, 0xc7,                          // cmp rdi,r8
    0x72, 0xf3,                                // jb sweep_in
    0xe9, 0x31, 0xff, 0xff, 0xff,              // jmp next
    // wait:
    0x0f, 0xb7, 0x07,                          // movzx eax,WORD PTR [rdi]
    0x39, 0xe8,                                // cmp eax,ebp
    0x0f, 0x84, 0x26, 0xff, 0xff, 0xff,        // je next
    0xe4, 0x80,                                // in al,0x80
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xee,                                // jne wait
    0xe9, 0x5d, 0x01, 0x00, 0x00,              // jmp fail
    // fill:
    0x40, 0x88, 0x2f,                          // mov BYTE PTR [rdi],bpl
    0x48, 0xff, 0xc7,                          // inc rdi
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xf5,                                // jne fill
    0xe9, 0x0a, 0xff, 0xff, 0xff,              // jmp next
    // again:
    0x49, 0x8b, 0x47, 0x10,                    // mov rax,QWORD PTR [r15+0x10]
    0x48, 0xff, 0xc8,                          // dec rax
    0x49, 0x89, 0x47, 0x10,                    // mov QWORD PTR [r15+0x10],rax
    0x0f, 0x84, 0xf9, 0xfe, 0xff, 0xff,        // je next
    0x48, 0x89, 0xfe,                          // mov rsi,rdi
    0xe9, 0xf1, 0xfe, 0xff, 0xff,              // jmp next
    // seed:
    0x49, 0x89, 0xec,                          // mov r12,rbp
    0xe9, 0xe9, 0xfe, 0xff, 0xff,              // jmp next
    // random_memory:
    0x49, 0x89, 0xfa,                          // mov r10,rdi
    0x49, 0x89, 0xee,                          // mov r14,rbp
    // random_memory_one:
    0xe8, 0xaa, 0x00, 0x00, 0x00,              // call roll
    0x4c, 0x89, 0xe7,                          // mov rdi,r12
    0x4c, 0x21, 0xf7,                          // and rdi,r14
    0x4c, 0x01, 0xd7,                          // add rdi,r10
    0xe8, 0x51, 0x00, 0x00, 0x00,              // call pick
    0xe8, 0x8c, 0x00, 0x00, 0x00,              // call load_or_store
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xe3,                                // jne random_memory_one
    0xe9, 0xc1, 0xfe, 0xff, 0xff,              // jmp next
    // random_port:
    0x49, 0x89, 0xfa,                          // mov r10,rdi
    0x49, 0x89, 0xee,                          // mov r14,rbp
    // random_port_one:
    0xe8, 0x82, 0x00, 0x00, 0x00,              // call roll
    0x4c, 0x89, 0xe7,                          // mov rdi,r12
    0x4c, 0x21, 0xf7,                          // and rdi,r14
    0x4c, 0x01, 0xd7,                          // add rdi,r10
    0xe8, 0x29, 0x00, 0x00, 0x00,              // call pick
    0x83, 0xf9, 0x03,                          // cmp ecx,0x3
    0x75, 0x05,                                // jne random_port_size
    0xb9, 0x02, 0x00, 0x00, 0x00,              // mov ecx,0x2
    // random_port_size:
    0x41, 0xf7, 0xc5, 0x01, 0x00, 0x00, 0x00,  // test r13d,0x1
    0x74, 0x07,                                // je random_port_in
    0xe8, 0xb1, 0x00, 0x00, 0x00,              // call port_out
    0xeb, 0x05,                                // jmp random_port_done
    // random_port_in:
    0xe8, 0xbc, 0x00, 0x00, 0x00,              // call port_in
    // random_port_done:
    0x49, 0xff, 0xc8,                          // dec r8
    0x75, 0xc9,                                // jne random_port_one
    0xe9, 0x7f, 0xfe, 0xff, 0xff,              // jmp next
    // pick: Size to ecx, value to rbp, direction to bit 0 of r13; mostly aligned.
    0x4d, 0x89, 0xe5,                          // mov r13,r12
    0x49, 0xc1, 0xed, 0x38,                    // shr r13,0x38
    0x44, 0x89, 0xe9,                          // mov ecx,r13d
    0x83, 0xe1, 0x07,                          // and ecx,0x7
    0x83, 0xf9, 0x03,                          // cmp ecx,0x3
    0x76, 0x05,                                // jbe picked
    0xb9, 0x02, 0x00, 0x00, 0x00,              // mov ecx,0x2
    // picked:
    0x41, 0xf7, 0xc5, 0x18, 0x00, 0x00, 0x00,  // test r13d,0x18
    0x74, 0x04,                                // je crooked
    0x48, 0x83, 0xe7, 0xfc,                    // and rdi,0xfffffffffffffffc
    // crooked:
    0x49, 0xc1, 0xed, 0x05,                    // shr r13,0x5
    0xe8, 0x1e, 0x00, 0x00, 0x00,              // call roll
    0x4c, 0x89, 0xe5,                          // mov rbp,r12
    0x41, 0xf7, 0xc5, 0x02, 0x00, 0x00, 0x00,  // test r13d,0x2
    0x74, 0x06,                                // je whole
    0x81, 0xe5, 0x8f, 0x00, 0x00, 0x00,        // and ebp,0x8f
    // whole:
    0xc3,                                      // ret
    // load_or_store:
    0x41, 0xf7, 0xc5, 0x01, 0x00, 0x00, 0x00,  // test r13d,0x1
    0x75, 0x21,                                // jne store
    0xeb, 0x3a,                                // jmp load
    // roll: The next random number (xorshift).
    0x4c, 0x89, 0xe0,                          // mov rax,r12
    0x48, 0xc1, 0xe0, 0x0d,                    // shl rax,0xd
    0x49, 0x31, 0xc4,                          // xor r12,rax
    0x4c, 0x89, 0xe0,                          // mov rax,r12
    0x48, 0xc1, 0xe8, 0x07,                    // shr rax,0x7
    0x49, 0x31, 0xc4,                          // xor r12,rax
    0x4c, 0x89, 0xe0,                          // mov rax,r12
    0x48, 0xc1, 0xe0, 0x11,                    // shl rax,0x11
    0x49, 0x31, 0xc4,                          // xor r12,rax
    0xc3,                                      // ret
    // store:
    0x83, 0xf9, 0x01,                          // cmp ecx,0x1
    0x72, 0x0b,                                // jb store1
    0x74, 0x0d,                                // je store2
    0x83, 0xf9, 0x02,                          // cmp ecx,0x2
    0x74, 0x0c,                                // je store4
    0x48, 0x89, 0x2f,                          // mov QWORD PTR [rdi],rbp
    0xc3,                                      // ret
    // store1:
    0x40, 0x88, 0x2f,                          // mov BYTE PTR [rdi],bpl
    0xc3,                                      // ret
    // store2:
    0x66, 0x89, 0x2f,                          // mov WORD PTR [rdi],bp
    0xc3,                                      // ret
    // store4:
    0x89, 0x2f,                                // mov DWORD PTR [rdi],ebp
    0xc3,                                      // ret
    // load:
    0x83, 0xf9, 0x01,                          // cmp ecx,0x1
    0x72, 0x0b,                                // jb load1
    0x74, 0x0d,                                // je load2
    0x83, 0xf9, 0x02,                          // cmp ecx,0x2
    0x74, 0x0c,                                // je load4
    0x48, 0x8b, 0x07,                          // mov rax,QWORD PTR [rdi]
    0xc3,                                      // ret
    // load1:
    0x0f, 0xb6, 0x07,                          // movzx eax,BYTE PTR [rdi]
    0xc3,                                      // ret
    // load2:
    0x0f, 0xb7, 0x07,                          // movzx eax,WORD PTR [rdi]
    0xc3,                                      // ret
    // load4:
    0x8b, 0x07,                                // mov eax,DWORD PTR [rdi]
    0xc3,                                      // ret
    // port_out:
    0x89, 0xfa,                                // mov edx,edi
    0x89, 0xe8,                                // mov eax,ebp
    0x83, 0xf9, 0x01,                          // cmp ecx,0x1
    0x72, 0x04,                                // jb out1
    0x74, 0x04,                                // je out2
    0xef,                                      // out dx,eax
    0xc3,                                      // ret
    // out1:
    0xee,                                      // out dx,al
    0xc3,                                      // ret
    // out2:
    0x66, 0xef,                                // out dx,ax
    0xc3,                                      // ret
    // port_in:
    0x89, 0xfa,                                // mov edx,edi
    0x83, 0xf9, 0x01,                          // cmp ecx,0x1
    0x72, 0x04,                                // jb in1
    0x74, 0x04,                                // je in2
    0xed,                                      // in eax,dx
    0xc3,                                      // ret
    // in1:
    0xec,                                      // in al,dx
    0xc3,                                      // ret
    // in2:
    0x66, 0xed,                                // in ax,dx
    0xc3,                                      // ret
    // fail: Says "bad" and the number of the record, then resets.
    0x49, 0x81, 0xef, 0x00, 0x10, 0x10, 0x00,  // sub r15,0x101000
    0x49, 0xc1, 0xef, 0x05,                    // shr r15,0x5
    0xba, 0xf8, 0x03, 0x00, 0x00,              // mov edx,0x3f8
    0xb0, 0x62,                                // mov al,0x62
    0xee,                                      // out dx,al
    0xb0, 0x61,                                // mov al,0x61
    0xee,                                      // out dx,al
    0xb0, 0x64,                                // mov al,0x64
    0xee,                                      // out dx,al
    0xb0, 0x20,                                // mov al,0x20
    0xee,                                      // out dx,al
    0xb9, 0x04, 0x00, 0x00, 0x00,              // mov ecx,0x4
    // digit:
    0x66, 0x41, 0xc1, 0xc7, 0x04,              // rol r15w,0x4
    0x44, 0x89, 0xf8,                          // mov eax,r15d
    0x83, 0xe0, 0x0f,                          // and eax,0xf
    0x83, 0xc0, 0x30,                          // add eax,0x30
    0x83, 0xf8, 0x3a,                          // cmp eax,0x3a
    0x72, 0x03,                                // jb decimal
    0x83, 0xc0, 0x27,                          // add eax,0x27
    // decimal:
    0xee,                                      // out dx,al
    0xff, 0xc9,                                // dec ecx
    0x75, 0xe5,                                // jne digit
    0xb0, 0x0a,                                // mov al,0xa
    0xee,                                      // out dx,al
    0xb0, 0xfe,                                // mov al,0xfe
    0xe6, 0x64,                                // out 0x64,al
    0xe9, 0xa3, 0xfd, 0xff, 0xff,              // jmp halt
    // table: where each is, from here.
    0xa3, 0xfd, 0xff, 0xff,                    // halt
    0xa6, 0xfd, 0xff, 0xff,                    // write
    0xb2, 0xfd, 0xff, 0xff,                    // read
    0xbe, 0xfd, 0xff, 0xff,                    // check
    0xd1, 0xfd, 0xff, 0xff,                    // differs
    0xe1, 0xfd, 0xff, 0xff,                    // outs_
    0xed, 0xfd, 0xff, 0xff,                    // ins_
    0xfc, 0xfd, 0xff, 0xff,                    // sweep_write
    0x0e, 0xfe, 0xff, 0xff,                    // sweep_read
    0x20, 0xfe, 0xff, 0xff,                    // sweep_out
    0x32, 0xfe, 0xff, 0xff,                    // sweep_in
    0x44, 0xfe, 0xff, 0xff,                    // wait
    0x5b, 0xfe, 0xff, 0xff,                    // fill
    0x6b, 0xfe, 0xff, 0xff,                    // again
    0x84, 0xfe, 0xff, 0xff,                    // seed
    0x8c, 0xfe, 0xff, 0xff,                    // random_memory
    0xb4, 0xfe, 0xff, 0xff,                    // random_port
];
