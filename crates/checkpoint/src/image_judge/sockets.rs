//! Judgement of TCP and UDP sockets, and of the options of all sockets.

use super::{ImageJudge, Verdict, refuse_for_users, require};
use crate::files::image::FileId;
use crate::sockets::{SocketState, SocketStaticState};
use holdfast_tcp_repair::non_integer_options::NonIntegerOptions;
use holdfast_tcp_repair::udp::{self, Datagram, MulticastMembership, UdpStaticState};
use holdfast_tcp_repair::{
    CongestionState, EndedTcpSocket, Linger, ListenParameters, PendingInput, SocketOptions,
    TcpDynamicState, TcpRepairWindow, TcpStaticState, UnconnectedTcpSocket,
};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Options (level, name) that require a capability for any value except 0. The kernel's names (`asm/socket.h`,
/// `linux/in.h`, `linux/in6.h`, `linux/tcp.h`): `SO_DEBUG`, `SO_MARK`, `SO_SNDBUFFORCE`, `SO_RCVBUFFORCE`,
/// `SO_BUSY_POLL`, `SO_TXTIME`, `SO_PREFER_BUSY_POLL`, `SO_BUSY_POLL_BUDGET`, `SO_RESERVE_MEM`; `IP_IPSEC_POLICY`,
/// `IP_XFRM_POLICY`, `IP_TRANSPARENT`; `IPV6_IPSEC_POLICY`, `IPV6_XFRM_POLICY`, `IPV6_HOPOPTS`, `IPV6_RTHDR`,
/// `IPV6_DSTOPTS`, `IPV6_TRANSPARENT`; `TCP_REPAIR` and its companions.
const PRIVILEGED_OPTIONS: [(i32, i32); 23] = [
    (SOL_SOCKET, 1),
    (SOL_SOCKET, 36),
    (SOL_SOCKET, 32),
    (SOL_SOCKET, 33),
    (SOL_SOCKET, 46),
    (SOL_SOCKET, 61),
    (SOL_SOCKET, 69),
    (SOL_SOCKET, 70),
    (SOL_SOCKET, 73),
    (IPPROTO_IP, 16),
    (IPPROTO_IP, 17),
    (IPPROTO_IP, 19),
    (IPPROTO_IPV6, 34),
    (IPPROTO_IPV6, 35),
    (IPPROTO_IPV6, 54),
    (IPPROTO_IPV6, 57),
    (IPPROTO_IPV6, 59),
    (IPPROTO_IPV6, 75),
    (IPPROTO_TCP, 19),
    (IPPROTO_TCP, 20),
    (IPPROTO_TCP, 21),
    (IPPROTO_TCP, 22),
    (IPPROTO_TCP, 29),
];
/// Highest priority that requires no capability.
const PRIORITY_MAX: i32 = 6;

impl ImageJudge {
    /// Checks the states of sockets.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_socket_states(&self, states: &BTreeMap<FileId, SocketState>) -> Verdict {
        states.values().try_for_each(|state| match state {
            // Sequence numbers and queued data of connections that were judged by their addresses.
            SocketState::Connection(state) => {
                let TcpDynamicState {
                    state: _,
                    write_seq: _,
                    rcv_nxt: _,
                    mss: _,
                    timestamp: _,
                    window:
                        TcpRepairWindow {
                            snd_wl1_back: _,
                            snd_wnd: _,
                            max_window: _,
                            rcv_wnd: _,
                            rcv_wup_back: _,
                        },
                    congestion:
                        CongestionState {
                            window: _,
                            threshold: _,
                            srtt_us: _,
                            rttvar_us: _,
                            min_rtt_us: _,
                            delivery_rate: _,
                        },
                    ecn: _,
                    fin_unsent: _,
                    unread: _,
                    outgoing: _,
                    unsent: _,
                } = &**state;
                Ok(())
            }
            SocketState::Unconnected => Ok(()),
            SocketState::Datagrams(queue, groups) => {
                for Datagram {
                    source: _,
                    destination: _,
                    payload: _,
                } in queue
                {}
                for MulticastMembership {
                    group: _,
                    interface: _,
                    source: _,
                    blocked: _,
                } in groups
                {}
                Ok(())
            }
            SocketState::Closed(PendingInput {
                unread: _,
                is_reset: _,
            }) => Ok(()),
        })
    }

    pub(super) fn check_socket(&self, socket: &SocketStaticState) -> Verdict {
        match socket {
            SocketStaticState::Connection(fixed) => {
                let TcpStaticState {
                    local,
                    remote: _,
                    v6_socket: _,
                    window_scale: _,
                    sack: _,
                    timestamps: _,
                    ecn: _,
                    segment_size: _,
                    receive_shut: _,
                    options,
                } = &**fixed;
                self.check_port(local)?;
                self.check_stream_options(options, true)
            }
            SocketStaticState::Unconnected(fixed) => {
                let UnconnectedTcpSocket {
                    v6_socket: _,
                    local,
                    listen: waiting,
                    options,
                } = &**fixed;
                if let Some(ListenParameters {
                    backlog: _,
                    defer_accept_s: _,
                    fast_open: _,
                    // Fast Open keys are the listener's own; any process with a listener may set them.
                    fast_open_keys: _,
                }) = waiting
                {}
                local.iter().try_for_each(|local| self.check_port(local))?;
                self.check_stream_options(options, false)
            }
            SocketStaticState::Datagrams(fixed) => {
                let UdpStaticState {
                    v6_socket: _,
                    local,
                    remote: _,
                    ints,
                    buffer_sizes: buffers,
                    // The lock tells only if the program has fixed the sizes, which are judged themselves.
                    buffer_lock: _,
                    device: _,
                    multicast_interface: _,
                    memberships: _,
                    wide,
                    // Any process may shut down a direction of a socket.
                    shutdown: _,
                } = &**fixed;
                self.check_port(local)?;
                self.check_numbered_options(ints, udp::option_by_id)?;
                self.check_wide_options(wide)?;
                self.check_buffers(*buffers)
            }
            SocketStaticState::Ended { v6_socket: _ } => Ok(()),
            SocketStaticState::Closed(fixed) => {
                let EndedTcpSocket {
                    v6_socket: _,
                    options,
                } = &**fixed;
                self.check_stream_options(options, true)
            }
        }
    }

    fn check_port(&self, local: &SocketAddr) -> Verdict {
        let (port, first) = (local.port(), self.node_limits.first_port);
        require(
            port == 0 || port >= first || self.policy.ports.contains(&port),
            || {
                format!(
                    "it has a socket at {local}: ports below {first} are reserved for root, except those of [[service]] and \
                 [migration] ports"
                )
            },
        )
    }

    /// Judges the options of a TCP socket. A connection may be transparent: a connection that keeps the address of an
    /// earlier node is made transparent here, and remains so when it moves on.
    fn check_stream_options(&self, options: &SocketOptions, connection: bool) -> Verdict {
        let SocketOptions {
            ints,
            linger: Linger { on: _, seconds: _ },
            send_buffer,
            receive_buffer,
            // The lock tells only if the program has fixed the sizes, which are judged themselves.
            buffer_lock: _,
            max_pacing_rate: _,
            receive_timeout_us: _,
            send_timeout_us: _,
            congestion_control,
            // Any process may bind a socket to a device, and to absent addresses: the policy decides about addresses.
            device: _,
            free_bind: _,
            notsent_lowat: _,
            reuse_address: _,
            reuse_port: _,
            nonblocking: _,
            wide,
        } = options;
        self.check_wide_options(wide)?;
        self.check_numbered_options(ints, |id| {
            let option = SocketOptions::option_by_id(id)?;
            (!connection || option != (IPPROTO_IP, libc::IP_TRANSPARENT)).then_some(option)
        })?;
        let known = self
            .node_limits
            .congestion_controls
            .contains(congestion_control);
        require(known || congestion_control.is_empty(), || {
            format!(
                "a socket has congestion control {congestion_control}, which this node restricts to root"
            )
        })?;
        self.check_buffers((*send_buffer, *receive_buffer))
    }

    fn check_wide_options(&self, options: &NonIntegerOptions) -> Verdict {
        let NonIntegerOptions {
            raw,
            // Any process may choose an interface, and attach a classic filter.
            unicast_interfaces: _,
            filter: _,
        } = options;
        for (id, value) in raw {
            if let Some(option) = NonIntegerOptions::option_by_id(*id) {
                let is_set = value.iter().any(|byte| *byte != 0);
                self.check_option(option, is_set.into())?;
            }
        }
        Ok(())
    }

    fn check_numbered_options(
        &self,
        ints: &[(u8, i32)],
        option_of: impl Fn(u8) -> Option<(i32, i32)>,
    ) -> Verdict {
        for (id, value) in ints {
            // An unknown option is not set.
            if let Some(option) = option_of(*id) {
                self.check_option(option, *value)?;
            }
        }
        Ok(())
    }

    /// Judges an option with the value that a program would set.
    pub(super) fn check_option(&self, (level, name): (i32, i32), value: i32) -> Verdict {
        if value != 0 && PRIVILEGED_OPTIONS.contains(&(level, name)) {
            return refuse_for_users(format!(
                "a socket has option {name} of level {level}, which requires a capability"
            ));
        }
        let (send, receive) = self.node_limits.buffers_max;
        let most = match (level, name) {
            (SOL_SOCKET, libc::SO_PRIORITY) => PRIORITY_MAX,
            (SOL_SOCKET, libc::SO_SNDBUF) => send,
            (SOL_SOCKET, libc::SO_RCVBUF) => receive,
            _ => return Ok(()),
        };
        require(value >= 0 && value <= most, || {
            format!(
                "a socket has {value} as option {name} of level {level}, above this node's limit {most}"
            )
        })
    }

    /// Judges buffer sizes as the kernel counts them: no larger than a program can request, or the kernel chooses by
    /// itself.
    fn check_buffers(&self, (send, receive): (i32, i32)) -> Verdict {
        let (send_max, receive_max) = self.node_limits.buffers_max;
        for (size, most) in [(send, send_max), (receive, receive_max)] {
            require(size >= 0 && size <= most, || {
                format!("a socket has a buffer of {size} bytes, above this node's limit {most}")
            })?;
        }
        Ok(())
    }
}
