//! Encoded states: any bytes decode to an error or a value, and every value survives encoding and decoding.

use holdfast_sys::netlink::attributes;
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_sys::tun::VnetHeader;
use holdfast_tcp_repair::udp::{Datagram, UdpStaticState, replay_packet};
use holdfast_tcp_repair::{
    CongestionState, TcpDynamicState, TcpRepairWindow, TcpStaticState, injected_peer_packet,
};
use proptest::prelude::*;

fn tcp_dynamic() -> impl Strategy<Value = TcpDynamicState> {
    let numbers = any::<[u32; 12]>();
    let state = prop::sample::select(vec![
        TcpState::Established,
        TcpState::FinWait1,
        TcpState::FinWait2,
        TcpState::CloseWait,
        TcpState::LastAck,
        TcpState::Closing,
    ]);
    (
        numbers,
        state,
        any::<(bool, bool, u16)>(),
        any::<(Vec<u8>, Vec<u8>)>(),
    )
        .prop_map(
            |(n, state, (ecn, fin_unsent, mss), (unread, outgoing))| TcpDynamicState {
                state,
                write_seq: n[0],
                rcv_nxt: n[1],
                mss,
                timestamp: n[2],
                window: TcpRepairWindow {
                    snd_wl1_back: n[3],
                    snd_wnd: n[4],
                    max_window: n[5],
                    rcv_wnd: n[6],
                    rcv_wup_back: n[7],
                },
                congestion: CongestionState {
                    window: n[8],
                    threshold: Some(n[9]),
                    srtt_us: n[10],
                    ..CongestionState::default()
                },
                ecn,
                fin_unsent,
                unread,
                outgoing,
                unsent: n[11],
            },
        )
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_without_panic(bytes: Vec<u8>) {
        let _ = postcard::from_bytes::<TcpDynamicState>(&bytes);
        let _ = postcard::from_bytes::<TcpStaticState>(&bytes);
        let _ = postcard::from_bytes::<UdpStaticState>(&bytes);
        let _ = TcpInfo::parse(&bytes);
        prop_assert!(attributes(&bytes).count() <= bytes.len() / 4);
        if let Ok(datagram) = postcard::from_bytes::<Datagram>(&bytes) {
            let _ = replay_packet(&datagram, datagram.source);
        }
        if let Some(header) = VnetHeader::parse(&bytes) {
            let mut packet = bytes[10..].to_vec();
            let _ = header.for_reinjection(&mut packet);
        }
    }

    #[test]
    fn dynamic_state_survives_encoding(state in tcp_dynamic()) {
        let bytes = postcard::to_stdvec(&state).expect("coded");
        prop_assert_eq!(postcard::from_bytes::<TcpDynamicState>(&bytes).expect("decoded"), state.clone());
        for end in 0..bytes.len() {
            prop_assert!(postcard::from_bytes::<TcpDynamicState>(&bytes[..end]).is_err());
        }
        let parts = state.outgoing_parts().map(|(sent, unsent)| (sent.len(), unsent.len()));
        match parts {
            Ok((sent, unsent)) => prop_assert_eq!(sent + unsent, state.outgoing.len()),
            Err(_) => prop_assert!(state.unsent as usize > state.outgoing.len()),
        }
    }

    #[test]
    fn drained_state_has_short_encoding(mut state in tcp_dynamic()) {
        state.unread.clear();
        state.outgoing.clear();
        state.unsent = 0;
        prop_assert!(postcard::to_stdvec(&state).expect("coded").len() <= 90);
    }

    #[test]
    fn half_closed_state_needs_one_injected_packet(state in tcp_dynamic(), bytes: Vec<u8>) {
        if let Ok(fixed) = postcard::from_bytes::<TcpStaticState>(&bytes)
            && fixed.local.is_ipv4() == fixed.remote.is_ipv4() {
            let needs_no_packet = matches!(state.state, TcpState::Established | TcpState::FinWait1);
            prop_assert_eq!(injected_peer_packet(&fixed, &state).is_none(), needs_no_packet);
        }
    }
}
