//! Channels of programs: one task for each.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_api::app::{Channel, Listener, decode, encode};
use holdfast_api::pool::{DATA_BYTES_MAX, FromPool, ToPool};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::requests::{ProgramQueue, Request, program_queue};
use crate::mailbox::Mailbox;
use crate::ready::Ready;

/// Maximum number of a program's bytes in transit to its sessions, beyond which the daemon stops reading from the
/// program.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// Accepts programs, forever.
pub(super) async fn accept(listener: Ready<Listener>, to: Mailbox<Request>) {
    let numbers = AtomicU64::new(1);
    loop {
        match listener.read(Listener::accept).await {
            Ok(channel) => {
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                let prepared = channel
                    .set_nonblocking(true)
                    .and_then(|()| Ready::new(channel));
                match prepared {
                    Ok(channel) => {
                        tokio::spawn(serve(number, channel, to.clone()));
                    }
                    Err(error) => tracing::warn!(%error, "refused a program"),
                }
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept programs");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serves one program until the program or the event loop ends the channel.
async fn serve(number: u64, channel: Ready<Channel>, to: Mailbox<Request>) {
    let (handle, queue) = program_queue();
    if !to.send(Request::Came(number, handle)).await {
        return;
    }
    // The first to end ends both: the program's last message, or the loop's.
    tokio::select! {
        read = read(number, &channel, &to) => {
            if let Err(why) = read {
                tracing::warn!(program = number, why, "a program broke the rules");
                if let Ok(bytes) = encode(&FromPool::Error(why)) {
                    let _ = channel.get().send(&bytes, &[]);
                }
            }
        }
        () = write(&channel, queue) => {}
    }
    to.send(Request::Gone(number)).await;
}

async fn write(channel: &Ready<Channel>, mut queue: ProgramQueue) {
    while let Some(bytes) = queue.next().await {
        let sent = channel.write(|channel| channel.send(&bytes, &[])).await;
        if sent.is_err() {
            return;
        }
    }
}

async fn read(number: u64, channel: &Ready<Channel>, to: &Mailbox<Request>) -> Result<(), String> {
    let room = Arc::new(Semaphore::new(UNSENT_BYTES_MAX));
    loop {
        let packet = match channel.read(Channel::receive).await {
            Ok(Some(packet)) => packet,
            Ok(None) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(error.to_string());
            }
            Err(_) => return Ok(()),
        };
        let message: ToPool = decode(&packet.bytes).map_err(|error| error.to_string())?;
        let permit = room_for(&message, &room).await?;
        if !to.send(Request::Said(number, message, permit)).await {
            return Ok(());
        }
    }
}

/// Waits until the message's data fits the program's limit.
async fn room_for(
    message: &ToPool,
    room: &Arc<Semaphore>,
) -> Result<Option<OwnedSemaphorePermit>, String> {
    let length = match message {
        ToPool::Data { bytes, .. } => bytes.len(),
        ToPool::Keep { state, .. } => state.len(),
        _ => return Ok(None),
    };
    if length > DATA_BYTES_MAX {
        return Err(format!(
            "{length} bytes in one message; at most {DATA_BYTES_MAX} are taken, so split it"
        ));
    }
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let permit = room.clone().acquire_many_owned(length).await;
    // The semaphore is never closed.
    Ok(permit.ok())
}
