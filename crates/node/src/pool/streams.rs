//! Sessions with elements over TCP and UDP: one task for each.

use std::io;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use holdfast_api::pool::DATA_BYTES_MAX;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::requests::{Request, StreamEvent};
use crate::mailbox::Mailbox;

/// Over what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Tcp,
    Udp,
}

/// What is to be sent.
pub(super) enum Sent {
    /// These bytes; what they used of their program's room.
    Data(Bytes, Option<OwnedSemaphorePermit>),
    /// The end of what is sent.
    Finish,
}

/// The way to a stream. Dropping it ends the stream.
pub(super) type StreamHandle = mpsc::UnboundedSender<Sent>;

/// Connects, and carries data both ways until either side ends it.
pub(super) async fn run(
    number: u64,
    kind: Kind,
    address: SocketAddr,
    sent: mpsc::UnboundedReceiver<Sent>,
    to: Mailbox<Request>,
) {
    let ended = match kind {
        Kind::Tcp => tcp(number, address, sent, &to).await,
        Kind::Udp => udp(number, address, sent, &to).await,
    };
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "a session's stream");
    }
    to.send(Request::Stream(number, StreamEvent::Down)).await;
}

async fn tcp(
    number: u64,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<Sent>,
    to: &Mailbox<Request>,
) -> io::Result<()> {
    let stream = tokio::select! {
        stream = TcpStream::connect(address) => stream?,
        // The session goes elsewhere before there is anything to send.
        () = abandoned(&mut sent) => return Ok(()),
    };
    stream.set_nodelay(true)?;
    to.send(Request::Stream(number, StreamEvent::Up)).await;
    let (mut reader, mut writer) = stream.into_split();
    let read = async {
        loop {
            let mut buffer = BytesMut::with_capacity(DATA_BYTES_MAX);
            if reader.read_buf(&mut buffer).await? == 0 {
                return io::Result::Ok(());
            }
            let data = StreamEvent::Data(buffer.freeze());
            to.send(Request::Stream(number, data)).await;
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            match next {
                Sent::Data(bytes, _room) => writer.write_all(&bytes).await?,
                Sent::Finish => writer.shutdown().await?,
            }
        }
        io::Result::Ok(())
    };
    tokio::select! {
        read = read => read,
        write = write => write,
    }
}

/// Ends when nobody can send any more. What is sent before the stream is there comes too early.
async fn abandoned(sent: &mut mpsc::UnboundedReceiver<Sent>) {
    while sent.recv().await.is_some() {}
}

async fn udp(
    number: u64,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<Sent>,
    to: &Mailbox<Request>,
) -> io::Result<()> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0; 16], 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(address).await?;
    to.send(Request::Stream(number, StreamEvent::Up)).await;
    let read = async {
        let mut buffer = vec![0; usize::from(u16::MAX)];
        loop {
            let length = socket.recv(&mut buffer).await?.min(DATA_BYTES_MAX);
            let data = StreamEvent::Data(Bytes::copy_from_slice(&buffer[..length]));
            to.send(Request::Stream(number, data)).await;
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            if let Sent::Data(bytes, _room) = next {
                socket.send(&bytes).await?;
            }
        }
        io::Result::Ok(())
    };
    tokio::select! {
        read = read => read,
        write = write => write,
    }
}
