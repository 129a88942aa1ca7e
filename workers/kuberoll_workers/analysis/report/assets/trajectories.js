
// The trajectories of the page: rows at once, texts a chunk at a time when they are wanted.

async function unpack(element) {
  const packed = atob(element.textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Trajectories {
  static keep = 12;

  constructor(index, starts, count) {
    this.index = index;
    this.starts = starts;
    this.count = count;
    this.opened = new Map();
  }

  name(number) {
    return `#${this.run(number)}${this.index.task[number]}.${this.index.rollout[number]}`;
  }

  // The letter of its run, where two are compared.
  run(number) {
    return this.index.run ? this.index.run[number] : "";
  }

  tokens(number) {
    return this.index.prompt[number] + this.index.generated[number] + this.index.observed[number];
  }

  named(text) {
    const [, run, task, rollout] = /^#([AB])?(\d+)(?:\.(\d+))?$/i.exec(text) || [];
    return task === undefined ? null : (number) => this.index.task[number] === Number(task)
      && (run === undefined || this.run(number) === run.toUpperCase())
      && (rollout === undefined || this.index.rollout[number] === Number(rollout));
  }

  chunkOf(number) {
    let low = 0, high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= number) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The last few chunks stay open: going through a list stays within one for a while.
  chunk(place) {
    const found = this.opened.get(place) || unpack($(`chunk-${place}`));
    this.opened.delete(place);
    this.opened.set(place, found);
    if (this.opened.size > Trajectories.keep) this.opened.delete(this.opened.keys().next().value);
    return found;
  }

  async text(number) {
    const place = this.chunkOf(number);
    return (await this.chunk(place))[number - this.starts[place]];
  }

  // Those of the candidates whose text has the words, chunk by chunk; `tell` hears of every one.
  async search(words, candidates, tell, wanted) {
    const wantedText = words.toLowerCase(), found = [];
    const byChunk = new Map();
    for (const number of candidates) {
      const place = this.chunkOf(number);
      if (!byChunk.has(place)) byChunk.set(place, []);
      byChunk.get(place).push(number);
    }
    let done = 0, paused = performance.now();
    for (const [place, numbers] of byChunk) {
      const texts = await (this.opened.get(place) || unpack($(`chunk-${place}`)));
      if (!wanted()) return null;
      for (const number of numbers) {
        if (Trajectories.has(texts[number - this.starts[place]], wantedText)) found.push(number);
      }
      tell(++done / byChunk.size, found.length);
      // What the reader does in the meantime goes first.
      if (performance.now() - paused > 12) {
        await new Promise((resume) => setTimeout(resume));
        paused = performance.now();
        if (!wanted()) return null;
      }
    }
    return found;
  }

  static has(text, words) {
    return text.messages.some((message) => message.text.toLowerCase().includes(words))
      || [text.failure && text.failure.cause, text.failure && text.failure.traceback, text.answer, text.idx, text.metadata].some((item) => item && item.toLowerCase().includes(words));
  }
}
