//! Errors of other crates as failures, with the party to blame, and failures as the control API shows them.

use std::io;

use holdfast_api::control::Blame;
use holdfast_checkpoint::error::Error as CheckpointError;
use holdfast_checkpoint::sockets::SocketError;
use holdfast_tcp_repair::udp::UdpError;
use holdfast_tcp_repair::{RepairError, UnmovableReason};
use holdfast_wire::failure::{
    Context, Failure, KernelFault, OperatorFault, Party, ProgramFault, ProtocolViolation,
    SystemError, Text,
};

/// Conversion of an error of another crate.
pub(crate) trait IntoFailure: Sized {
    /// Returns the failure of a step that uses state of another node: contradictions in the state are the peer's.
    fn into_failure(self) -> Failure;

    /// Returns the failure of a step that uses state of this node alone.
    fn into_own_failure(self) -> Failure {
        let failure = self.into_failure();
        match failure.party() {
            Party::Peer => failure.blame(Party::ThisNode),
            _ => failure,
        }
    }
}

impl IntoFailure for CheckpointError {
    fn into_failure(self) -> Failure {
        match self {
            CheckpointError::ProcessEnded(pid) => ProgramFault::ProcessEnded(pid).into(),
            CheckpointError::Blocked(blockers) => {
                let texts: Vec<String> = blockers.iter().map(ToString::to_string).collect();
                ProgramFault::CannotMove(texts.join("; ").into()).into()
            }
            CheckpointError::StopTimeout(thread) => KernelFault::StopTimeout(thread).into(),
            CheckpointError::Refused(why) => OperatorFault::MachineUnsuitable(why.into()).into(),
            CheckpointError::Socket(error) => error.into_failure(),
            CheckpointError::Image(why) => ProtocolViolation::MalformedImage(why.into()).into(),
            CheckpointError::Kernel { operation, source } => system_call(operation, &source),
        }
    }
}

impl IntoFailure for SocketError {
    fn into_failure(self) -> Failure {
        match self {
            SocketError::Tcp(error) => error.into_failure(),
            SocketError::Udp(error) => error.into_failure(),
            SocketError::Unknown => ProtocolViolation::SocketMismatch.into(),
            SocketError::Socket { id, error } => error.into_failure().within(Context::Socket(id)),
        }
    }
}

impl IntoFailure for RepairError {
    fn into_failure(self) -> Failure {
        match self {
            RepairError::Unmovable(reason) => unmovable_socket(&reason),
            RepairError::Kernel { step, source } => system_call(step, &source),
            RepairError::AddressInUse(address) => OperatorFault::AddressInUse(address).into(),
            RepairError::Inconsistent(why) => {
                ProtocolViolation::InconsistentSocket(why.into()).into()
            }
        }
    }
}

impl IntoFailure for UdpError {
    fn into_failure(self) -> Failure {
        match self {
            UdpError::Kernel { step, source } => system_call(step, &source),
            UdpError::AddressInUse(address) => OperatorFault::AddressInUse(address).into(),
            UdpError::DeviceAbsent(name) => OperatorFault::DeviceAbsent(name.into()).into(),
            feature @ (UdpError::NotUdp
            | UdpError::NotBound
            | UdpError::Encapsulation
            | UdpError::Corked
            | UdpError::EbpfFilter
            | UdpError::NumberedTimestamps
            | UdpError::HardwareClock) => ProgramFault::UnmovableSocket(Text::of(feature)).into(),
        }
    }
}

impl IntoFailure for holdfast_bpf::Error {
    fn into_failure(self) -> Failure {
        KernelFault::Ebpf(Text::of(self)).into()
    }
}

/// Returns the failure of a socket that cannot move: the program's, unless a host lacks something.
fn unmovable_socket(reason: &UnmovableReason) -> Failure {
    let cause = ProgramFault::UnmovableSocket(Text::of(reason));
    match reason {
        UnmovableReason::DeviceAbsent(_)
        | UnmovableReason::CongestionControlAbsent(_)
        | UnmovableReason::OtherNamespace => Failure::new(Party::Operator, cause),
        _ => cause.into(),
    }
}

/// Returns the failure of a system call.
pub(crate) fn system_call(action: impl Into<Text>, error: &io::Error) -> Failure {
    let (action, error) = (action.into(), SystemError::from(error));
    KernelFault::SystemCall { action, error }.into()
}

/// Returns the failure to start a thread.
pub(crate) fn thread_failure(error: &io::Error) -> Failure {
    system_call("cannot start a thread", error)
}

/// Returns the party to blame, as in the control API.
pub(crate) fn blame_of(failure: &Failure) -> Blame {
    match failure.party() {
        Party::ThisNode => Blame::Node,
        Party::Peer => Blame::Peer,
        Party::Program => Blame::Program,
        Party::Operator => Blame::Operator,
        Party::Kernel => Blame::Kernel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A failure has the same text as the error, and blames the party that can remove the cause.
    #[test]
    fn errors_keep_their_words() {
        let kernel = |code| io::Error::from_raw_os_error(code);
        let address = "10.0.0.1:80".parse().expect("an address");
        let cases: [(fn() -> CheckpointError, Party); 5] = [
            (|| CheckpointError::ProcessEnded(7), Party::Program),
            (|| CheckpointError::StopTimeout(8), Party::Kernel),
            (
                || CheckpointError::Refused("no such library".to_owned()),
                Party::Operator,
            ),
            (|| CheckpointError::Image("too long"), Party::Peer),
            (
                || CheckpointError::Kernel {
                    operation: "mmap".to_owned(),
                    source: io::Error::from_raw_os_error(12),
                },
                Party::Kernel,
            ),
        ];
        for (error, party) in cases {
            let failure = error().into_failure();
            assert_eq!(failure.to_string(), error().to_string());
            assert_eq!(failure.party(), party);
        }
        let own = CheckpointError::Image("too long").into_own_failure();
        assert_eq!(own.party(), Party::ThisNode);
        let step = || RepairError::Kernel {
            step: "TCP_REPAIR",
            source: kernel(1),
        };
        let of_socket = || SocketError::Socket {
            id: 3,
            error: Box::new(SocketError::Tcp(step())),
        };
        assert_eq!(
            of_socket().into_failure().to_string(),
            of_socket().to_string()
        );
        let in_use = || RepairError::AddressInUse(address);
        assert_eq!(in_use().into_failure().to_string(), in_use().to_string());
    }
}
