//! What Linux's SCTP (`linux/sctp.h`) is told and tells, laid out by hand: several of its structures are packed.

use crate::address::RawAddress;
use crate::transport::Config;
use crate::transport::assembly::Dialect;
use crate::transport::layout::{packed, u32_at};
use std::net::SocketAddr;
use std::time::Duration;

pub const RTOINFO: i32 = 0;
pub const ASSOCINFO: i32 = 1;
pub const INITMSG: i32 = 2;
pub const NODELAY: i32 = 3;
pub const PEER_ADDR_PARAMS: i32 = 9;
pub const STATUS: i32 = 14;
pub const GET_PEER_ADDR_INFO: i32 = 15;
pub const PARTIAL_DELIVERY_POINT: i32 = 19;
pub const RECVRCVINFO: i32 = 32;
pub const BINDX_ADD: i32 = 100;
pub const GET_PEER_ADDRS: i32 = 108;
pub const GET_LOCAL_ADDRS: i32 = 109;
pub const CONNECTX3: i32 = 111;
pub const EVENT: i32 = 127;
pub const REMOTE_UDP_ENCAPS_PORT: i32 = 132;

/// `enum sctp_cmsg_type`.
pub const CMSG_SNDINFO: i32 = 2;
pub const CMSG_RCVINFO: i32 = 3;

/// `enum sctp_sinfo_flags`.
pub const UNORDERED: u16 = 1;
pub const ABORT: u16 = 4;
pub const EOF: u16 = 0x200;

/// `MSG_NOTIFICATION`.
pub const MSG_NOTIFICATION: i32 = 0x8000;

/// `enum sctp_sn_type`, and flags.
pub const DIALECT: Dialect = Dialect {
    assoc_change: 0x8001,
    path_change: 0x8002,
    send_failed: 0x800d,
    first_state: 0,
    unordered: UNORDERED,
    data_sent: 1,
};

/// Room for addresses that the kernel lists.
pub const LIST_LEN: usize = 8 + 64 * 28;

fn ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// The options of `config` that every socket gets, as name and value. `receive_buffer` is what `SO_RCVBUF` tells.
pub fn options(config: &Config, receive_buffer: u32) -> Vec<(i32, Vec<u8>)> {
    let failure = &config.failure;
    let rto = [
        0,
        ms(failure.rto_initial),
        ms(failure.rto_max),
        ms(failure.rto_min),
    ];
    let init = [
        config.outbound_streams,
        config.streams,
        failure.init_retransmissions,
        u16::try_from(ms(failure.rto_max)).unwrap_or(u16::MAX),
    ];
    // `struct sctp_assocparams`: association, retransmissions, (read only) destinations, three words that 0 leaves alone.
    let mut assoc = vec![0; 20];
    assoc[4..6].copy_from_slice(&failure.association_retransmissions.to_ne_bytes());
    // The kernel refuses more than half of its buffer, which without capabilities is smaller than what was asked for.
    let buffer = config.receive_buffer.min(receive_buffer);
    let whole = config.message_len_max.min(buffer / 2);
    let mut options = vec![
        (RTOINFO, words(rto)),
        (
            INITMSG,
            init.into_iter().flat_map(u16::to_ne_bytes).collect(),
        ),
        (ASSOCINFO, assoc),
        (PEER_ADDR_PARAMS, path_params(config)),
        (NODELAY, words([u32::from(config.no_delay)])),
        (RECVRCVINFO, words([1])),
        (PARTIAL_DELIVERY_POINT, words([whole])),
    ];
    for kind in [
        DIALECT.assoc_change,
        DIALECT.path_change,
        DIALECT.send_failed,
    ] {
        // `struct sctp_event`: association, type, on.
        let mut event = vec![0; 8];
        event[4..6].copy_from_slice(&kind.to_ne_bytes());
        event[6] = 1;
        options.push((EVENT, event));
    }
    options
}

/// `struct sctp_paddrparams`, packed: no address, so all paths of associations to come.
fn path_params(config: &Config) -> Vec<u8> {
    /// `SPP_HB_ENABLE` and `SPP_PMTUD_DISABLE`.
    const FLAGS: u32 = 1 | 1 << 4;
    let mut bytes = vec![0; 156];
    bytes[132..136].copy_from_slice(&ms(config.failure.heartbeat).to_ne_bytes());
    bytes[136..138].copy_from_slice(&config.failure.path_retransmissions.to_ne_bytes());
    bytes[138..142].copy_from_slice(&config.path_mtu.to_ne_bytes());
    bytes[146..150].copy_from_slice(&FLAGS.to_ne_bytes());
    bytes
}

/// `struct sctp_udpencaps` for associations to come.
pub fn encapsulation(port: Option<u16>) -> Vec<u8> {
    let mut bytes = vec![0; 144];
    // The kernel wants an address here that says which; one of no family stands for all.
    bytes[136..138].copy_from_slice(&port.unwrap_or(0).to_be_bytes());
    bytes
}

/// `spinfo_srtt` of the primary path in a `struct sctp_status`. RFC 6458, section 8.2.2, wants milliseconds; the kernel gives
/// its own `tick`s, which are as long only if it has 1000 in a second.
pub fn srtt(status: &[u8], tick: Duration) -> Option<Duration> {
    Some(tick * u32_at(status, 164)?)
}

/// The length of a `struct sctp_status`.
pub const STATUS_LEN: usize = 176;

/// `SCTP_UNCONFIRMED` of `enum sctp_spinfo_state`.
pub const UNCONFIRMED: u32 = 3;

/// `struct sctp_paddrinfo`, packed: association, address, state, four more words.
pub fn path_info(assoc: u32, address: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![0; 152];
    bytes[..4].copy_from_slice(&assoc.to_ne_bytes());
    let address = packed(&[address]);
    bytes[4..][..address.len()].copy_from_slice(&address);
    bytes
}

/// `spinfo_state` of such a structure.
pub fn path_state(info: &[u8]) -> Option<u32> {
    u32_at(info, 132)
}

/// `struct sctp_sndinfo`.
pub fn sndinfo(assoc: u32, stream: u16, flags: u16, ppid: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&stream.to_ne_bytes());
    bytes[2..4].copy_from_slice(&flags.to_ne_bytes());
    bytes[4..8].copy_from_slice(&ppid.to_be_bytes());
    bytes[12..].copy_from_slice(&assoc.to_ne_bytes());
    bytes
}

/// The same addresses with another port.
pub fn with_port(addresses: &[SocketAddr], port: u16) -> Vec<SocketAddr> {
    let with_port = |address: &SocketAddr| SocketAddr::new(address.ip(), port);
    addresses.iter().map(with_port).collect()
}

/// The first address of a list, for calls that take one.
pub fn first(addresses: &[SocketAddr]) -> Option<RawAddress> {
    addresses
        .first()
        .map(|&first| RawAddress::for_family(first, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_counted_in_the_kernel_s_ticks() {
        let mut status = [0; STATUS_LEN];
        status[164..168].copy_from_slice(&15u32.to_ne_bytes());
        let ms = Duration::from_millis;
        assert_eq!(srtt(&status, ms(10)), Some(ms(150)));
        assert_eq!(srtt(&status, ms(1)), Some(ms(15)));
        assert_eq!(srtt(&status[..100], ms(1)), None);
    }

    #[test]
    fn whole_messages_are_as_long_as_the_buffer_that_there_is_allows() {
        let config = Config::new(vec!["127.0.0.1:0".parse().unwrap()]);
        let whole = |receive_buffer| {
            let options = options(&config, receive_buffer);
            let point = options
                .into_iter()
                .find(|(name, _)| *name == PARTIAL_DELIVERY_POINT);
            point.map(|(_, value)| value)
        };
        assert_eq!(whole(425_984), Some(words([212_992])));
        assert_eq!(whole(2 << 20), Some(words([config.receive_buffer / 2])));
    }
}
