/* Proves that /dev/kvm runs guests: thirteen bytes of real-mode code write "KVM" to a port, and halt. */
#include <err.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

static const unsigned char code[] = {
	0xb0, 'K', 0xe6, 0x10, /* mov $'K', %al; out %al, $0x10 */
	0xb0, 'V', 0xe6, 0x10,
	0xb0, 'M', 0xe6, 0x10,
	0xf4, /* hlt */
};

static int must(int result, const char *what)
{
	if (result < 0)
		err(1, "%s", what);
	return result;
}

static void *map(size_t size, int flags, int fd)
{
	void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);

	if (place == MAP_FAILED)
		err(1, "mmap");
	return place;
}

static int new_vcpu(int vm)
{
	int vcpu = must(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2 };
	struct kvm_sregs sregs;

	must(ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs.base = 0;
	sregs.cs.selector = 0;
	must(ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	must(ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
	return vcpu;
}

static void run(int vcpu, const struct kvm_run *state)
{
	for (;;) {
		must(ioctl(vcpu, KVM_RUN, 0), "KVM_RUN");
		switch (state->exit_reason) {
		case KVM_EXIT_IO:
			putchar(((const char *)state)[state->io.data_offset]);
			break;
		case KVM_EXIT_HLT:
			putchar('\n');
			return;
		default:
			errx(1, "unexpected exit, reason %u", state->exit_reason);
		}
	}
}

int main(void)
{
	int kvm = must(open("/dev/kvm", O_RDWR | O_CLOEXEC), "/dev/kvm");
	int version = must(ioctl(kvm, KVM_GET_API_VERSION, 0), "KVM_GET_API_VERSION");
	int vm, vcpu;
	struct kvm_userspace_memory_region region = { .guest_phys_addr = 0x1000, .memory_size = 0x1000 };
	void *page = map(0x1000, MAP_SHARED | MAP_ANONYMOUS, -1);

	if (version != KVM_API_VERSION)
		errx(1, "KVM API version %d", version);
	vm = must(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	memcpy(page, code, sizeof(code));
	region.userspace_addr = (unsigned long)page;
	must(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
	vcpu = new_vcpu(vm);
	run(vcpu, map(must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE"), MAP_SHARED, vcpu));
	return 0;
}
