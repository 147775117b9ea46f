// The microphone: what is said into it, as a wav file that every server of speech reads.

/** A model of speech hears no more. */
const RATE = 16_000;
export const MOST_SECONDS = 1800;

/** Browsers have it on encrypted connections and on this machine only. */
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);

/** Begins to record; { stop() } gives the file. Throws an Error where the microphone is not to be had. */
export async function record() {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new Error(error.name === "NotAllowedError" ? "The browser was told not to let this page use the microphone." : `There is no microphone to record with: ${error.message}`);
  }
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const ended = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.start(1000);
  return {
    async stop() {
      recorder.stop();
      await ended;
      for (const track of stream.getTracks()) track.stop();
      return asWav(await new Blob(parts).arrayBuffer());
    },
  };
}

/** What browsers record (WebM, MP4) as 16-bit samples of one channel. */
async function asWav(recorded) {
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(recorded);
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, i) => decoded.getChannelData(i));
  const view = new DataView(new ArrayBuffer(44 + 2 * decoded.length));
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * decoded.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes a frame
  view.setUint16(34, 16, true); // bits a sample
  text(36, "data");
  view.setUint32(40, 2 * decoded.length, true);
  for (let i = 0; i < decoded.length; i++) {
    const sample = channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length;
    view.setInt16(44 + 2 * i, 32767 * Math.max(-1, Math.min(1, sample)), true);
  }
  const time = new Date().toISOString().slice(0, 19).replaceAll(":", "");
  return new File([view], `recording-${time}.wav`, { type: "audio/wav" });
}
